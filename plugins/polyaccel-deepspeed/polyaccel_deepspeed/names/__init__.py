"""Which names of DeepSpeed there are, and the modules that are made of them."""
