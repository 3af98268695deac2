"""`polyaccel doctor`."""
