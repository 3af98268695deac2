"""Partitioned execution: parameters as whole leaves that rest cut over a mesh, the script's own or all devices."""
