"""Reading together: each byte range of a save is read once per host, by one rank, and shared with the others."""
