"""Estimates of a torch model's memory, from its shapes on the meta device."""
