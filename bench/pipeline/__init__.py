"""Two stages beside what their table promises, torch's own pipelines and data parallelism."""
