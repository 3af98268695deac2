"""Replicas: checkpoints in the memory of a keeper, one of each optimizer step."""
