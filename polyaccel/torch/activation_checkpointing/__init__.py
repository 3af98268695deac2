"""Regions of a model whose activations are computed again in backward instead of kept."""
