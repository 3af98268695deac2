"""Ranks that a command of an MPI or a scheduler starts: one process here, and tasks of that command on the hosts."""
