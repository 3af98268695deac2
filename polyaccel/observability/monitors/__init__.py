"""The built-in monitors, a file each; `jsonl` stands beside their contract."""
