"""The launchers that discovery finds, a file each: which variables they set and what those mean."""
