"""The contract of accelerators: subclass `AcceleratorContract`; or `KernelsContract`, its part for kernels alone."""

from polyaccel.testkit.accelerator.contract import AcceleratorContract as AcceleratorContract
from polyaccel.testkit.accelerator.kernels import KernelsContract as KernelsContract

__all__ = ["AcceleratorContract", "KernelsContract"]
