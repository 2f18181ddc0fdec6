"""What outlives a process: machine code of kernels and the choices of tuning. Knows no torch."""
