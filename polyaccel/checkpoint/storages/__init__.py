"""Storages beyond a folder that all ranks see."""
