"""Kernels of relative attention, with one signature, and of the softmax."""
