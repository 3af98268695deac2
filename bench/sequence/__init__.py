"""Attention of sequences over ranks."""
