"""What it costs to watch a run."""
