"""CUDA kernels of the reduction family; imported only where a CUDA device is used."""
