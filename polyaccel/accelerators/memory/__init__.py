"""Buffers over the memory of torch, numpy and JAX."""
