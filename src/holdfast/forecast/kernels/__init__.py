"""Which kernels CUDA takes, what they keep and what they need."""
