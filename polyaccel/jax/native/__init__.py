"""Native execution: a mesh, a step as one `shard_map` program, and memory that donated updates swap."""
