"""The ops on numpy arrays."""
