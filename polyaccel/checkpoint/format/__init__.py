"""The format of a checkpoint: manifest, tensors, pieces, commit markers, plain values, and how foreign folders look."""
