"""Triton kernels, each with a torch twin of the same signature."""
