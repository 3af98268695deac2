"""`polyaccel plugins`, `polyaccel plugins check` and `polyaccel plugins new`."""
