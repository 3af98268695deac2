"""What is measured of a step beside the host's time: the device's, and the work that was done."""
