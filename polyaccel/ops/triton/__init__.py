"""The ops as Triton kernels."""
