"""The launchers that discovery knows, a file each: which variables they set and what those mean."""
