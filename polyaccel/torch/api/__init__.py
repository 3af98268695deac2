"""The functions and objects that torch users have in addition to the engine: gathered parameters, fragments, loaders,
optimizers."""
