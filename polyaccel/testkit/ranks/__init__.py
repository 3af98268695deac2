"""Ranks for tests: as threads (`threads`), as processes (`procs`), as those that mpirun starts (`mpi`)."""
