"""Checkpoints of DeepSpeed as polyaccel's, and the other way round."""
