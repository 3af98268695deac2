"""The backend `shm`: the ranks of one Linux host, by memory that they share."""
