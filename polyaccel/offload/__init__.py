"""Tiers: the places where states rest between uses. Device memory, host memory and files are built in."""
