"""A list of functions of JAX as the layers of a pipeline, of which a stage has some."""
