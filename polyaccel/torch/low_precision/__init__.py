"""Linear layers whose products have operands in 8 or 4 bits."""
