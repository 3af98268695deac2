"""Collectives of two processes by backend and size, and a training step over each backend."""
