"""Kernels of the gemm family: Triton ones, and those that torch ships."""
