"""Jobs as documents that a cluster's own scheduler reads."""
