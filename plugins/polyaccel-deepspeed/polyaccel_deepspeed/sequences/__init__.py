"""Long sequences by DeepSpeed's names."""
