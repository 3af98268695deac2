"""Layers of one framework in a model of the other. The one package that imports both; `polyaccel.jax.as_torch` and
`polyaccel.torch.as_jax` are its public names, resolved when used."""
