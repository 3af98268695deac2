"""How fast a communicator moves buffers: measured, and as a table that others read."""
