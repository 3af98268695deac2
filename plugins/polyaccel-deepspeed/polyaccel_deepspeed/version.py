"""The version that clients compare: that of the DeepSpeed whose names these are, then polyaccel's own."""

__version__ = "0.19.8+polyaccel.0.1.0"
