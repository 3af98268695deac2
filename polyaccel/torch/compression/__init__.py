"""Quantisation and pruning while training, of layers that stay what they are for everything else."""
