"""Relative attention, several ways with one signature."""
