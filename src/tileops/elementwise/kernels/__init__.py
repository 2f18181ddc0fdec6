"""CUDA kernels of the elementwise family; imported only where a CUDA device is used."""
