"""What is measured of a step in addition to the host's time: the device's, and the work that was done."""
