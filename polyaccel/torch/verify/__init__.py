"""Shadow runs of torch modules: plain torch in place of an engine, and what both record."""
