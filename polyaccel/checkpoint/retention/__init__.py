"""Retention: which tags of a folder stay when a save has ended, and the deletion of the others."""
