"""The fused kernels of torch_npu under polyaccel. Importing this imports neither torch_npu nor torch."""
