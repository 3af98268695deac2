"""Planned against measured: what the tuner foretells of settings, and what they are."""
