"""Watching collectives: the flight recorder, the watchdog, dumps, where ranks diverged, and what calls cost."""
