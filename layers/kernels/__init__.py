"""Triton kernels, one file each, imported when a CUDA tensor first meets the kernel's operator."""
