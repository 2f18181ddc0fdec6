"""CUDA kernels of the quantization family; imported only where a CUDA device is used."""
