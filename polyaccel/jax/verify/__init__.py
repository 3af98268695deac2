"""Comparison of the engine for functions of JAX with plain JAX: `jax.value_and_grad`, `jit` and optax on trees."""
