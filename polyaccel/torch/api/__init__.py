"""The functions and objects that torch users have beside the engine: gathered parameters, fragments, loaders,
optimizers."""
