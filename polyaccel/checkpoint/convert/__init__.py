"""Checkpoints as files to look at, to compare, and to exchange with other tools. Nothing here trains."""
