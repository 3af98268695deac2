"""Tensor parallelism beside torch's own and beside one rank with as many threads."""
