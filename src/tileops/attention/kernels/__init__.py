"""Kernels of the attention family: Triton ones, and those that torch ships."""
