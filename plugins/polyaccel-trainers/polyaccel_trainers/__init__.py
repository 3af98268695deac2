"""Trainers of other projects over engines of polyaccel: a module for each project, which imports it."""
