"""What the ranks of a job and its launcher share: secrets, ports, readiness, trial variables, the memory server."""
