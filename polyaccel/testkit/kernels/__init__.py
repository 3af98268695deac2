"""The contract of kernels: every op of a table against its float64 meaning."""
