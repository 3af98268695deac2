"""The `polyaccel` command: one file a verb."""
