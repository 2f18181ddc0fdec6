"""CUDA kernels of the rope family; imported only where a CUDA device is used."""
