"""Communicators over other communicators: staged through host memory, of two levels, quantised."""
