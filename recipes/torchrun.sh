#!/bin/sh
# torchrun: NODES=2 HEAD=node0 recipes/torchrun.sh [arguments of the script], the same on every host.
# For platforms that start torchrun for you, or give each host the same command. HEAD is any one of the hosts, at which
# all of them meet; torchrun gives the hosts their numbers.
set -eu

if [ "${NODES:-1}" -eq 1 ]; then
    exec torchrun --standalone --nproc-per-node "${RANKS_PER_NODE:-2}" examples/gpt/train.py "$@"
fi
exec torchrun --nnodes "$NODES" --nproc-per-node "${RANKS_PER_NODE:-2}" --rdzv-backend c10d \
    --rdzv-endpoint "${HEAD:?the name of one of the hosts}:${PORT:-29400}" --rdzv-id "${JOB:-gpt}" \
    examples/gpt/train.py "$@"
