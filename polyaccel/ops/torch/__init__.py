"""The ops on torch tensors, on any device that torch supports."""
