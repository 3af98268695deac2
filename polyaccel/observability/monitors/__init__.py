"""The built-in monitors, a file each; `jsonl` stands next to their contract."""
