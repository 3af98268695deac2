"""The ops on arrays of JAX."""
