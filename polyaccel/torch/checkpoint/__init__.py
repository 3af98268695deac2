"""A torch engine's states: to and from checkpoints, one file of weights, host memory."""
