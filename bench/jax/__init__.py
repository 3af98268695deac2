"""The GPTs of the examples in torch and in JAX."""
