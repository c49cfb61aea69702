"""Triton kernels. Each has a torch twin that computes the same."""
