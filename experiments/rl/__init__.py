"""Reinforcement learning with a memory per episode."""
