"""A traced update over several ranks: each parameter is updated as a whole by the rank that owns it."""
