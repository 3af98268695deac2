"""The update of slices: agreement, norms, optimizers, and the walk over the buckets."""
