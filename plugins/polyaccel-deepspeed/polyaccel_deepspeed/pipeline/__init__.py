"""Pipelines by DeepSpeed's names and conventions."""
