"""A decoder for decoder-only models of transformers: static cache, rows without padding, compiled kernels."""
