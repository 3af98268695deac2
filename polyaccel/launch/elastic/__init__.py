"""Ranks on hosts that come and go."""
