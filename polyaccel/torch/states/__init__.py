"""The engine's states on their way elsewhere: checkpoints, one file of weights, host memory."""
