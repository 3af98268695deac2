"""Ranks on other hosts: an agent on each, which a launcher reaches by a shell of the network."""
