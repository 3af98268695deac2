"""Joining the ranks of a job: finding the backend, the host's neighbours, and making the default group."""
