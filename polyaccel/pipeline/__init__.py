"""Pipelines as tables, in integers only: what each stage does in which order, checked, timed and drawn."""
