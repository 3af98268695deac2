"""The backend `mpi`: ranks of mpirun, by mpi4py alone."""
