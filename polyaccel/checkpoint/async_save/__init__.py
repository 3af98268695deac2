"""Saves that a process beside a rank writes while training goes on."""
