"""The ranks of a job before they have a communicator: what they exchange, and how they connect."""
