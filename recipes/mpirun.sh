#!/bin/sh
# MPI: RANKS=16 HOSTFILE=hosts recipes/mpirun.sh [arguments of the script]
# For clusters whose hosts an mpirun reaches already. mpi4py of the same MPI agrees on where the ranks meet
# (pip install -e '.[mpi]'); POLYACCEL_COMM=mpi lets that MPI carry the collectives too.
# HOSTFILE has lines `host slots=8`; without one all ranks are here.
set -eu

# shellcheck disable=SC2086 # MPIRUN_OPTIONS are several words
exec mpirun -n "${RANKS:-2}" ${HOSTFILE:+--hostfile "$HOSTFILE"} ${MPIRUN_OPTIONS:-} \
    python examples/gpt/train.py "$@"
