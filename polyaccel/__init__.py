"""polyaccel."""
