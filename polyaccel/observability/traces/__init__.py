"""What every rank did in a few steps, on one clock: recorded, written for Perfetto, and looked at."""
