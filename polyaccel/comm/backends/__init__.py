"""The built-in backends, a folder each. They are reached through entry points."""
