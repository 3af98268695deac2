"""Values that follow from a config alone; one module for each thing that is built from them."""
