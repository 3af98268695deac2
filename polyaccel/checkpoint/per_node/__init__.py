"""Checkpoints on disks that hosts do not share: each host its own part, and a copy of its neighbour's."""
