"""The page of a run: its files followed as they grow, shown by a local server, or frozen into one file."""
