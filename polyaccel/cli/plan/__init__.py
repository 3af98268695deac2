"""`polyaccel plan`."""
