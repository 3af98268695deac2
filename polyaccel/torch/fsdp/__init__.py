"""Sharded parameters in torch: where they are gathered, and what users see of them meanwhile."""
