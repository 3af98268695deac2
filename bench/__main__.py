"""`python -m bench`: step times; `python -m bench all-to-all`, `backends`, `comm`, `experts`, `hosts`, `imports`,
`jax`, `kernels`, `longest`, `memory`, `ownership`, `pipeline`, `replica`, `saves`, `sequence`, `start`, `tensor`,
`trainer`, `tuning` and `watching`."""

from __future__ import annotations

import sys

from bench import imports, kernels
from bench.collectives import backends, sizes
from bench.experts import compare as experts
from bench.hosts import all_to_all, start, tax
from bench.jax import models
from bench.pipeline import compare as pipeline
from bench.sequence import attention, longest
from bench.steps import memory, ownership, replica, saves, times
from bench.tensor import compare as tensor
from bench.trainer import compare
from bench.tuning import compare as tuning
from bench.watching import compare as watching

_COMMANDS = {
    "all-to-all": all_to_all.main,
    "backends": backends.main,
    "comm": sizes.main,
    "experts": experts.main,
    "hosts": tax.main,
    "imports": imports.main,
    "jax": models.main,
    "longest": longest.main,
    "kernels": kernels.main,
    "memory": memory.main,
    "ownership": ownership.main,
    "pipeline": pipeline.main,
    "in_memory": replica.main,
    "saves": saves.main,
    "sequence": attention.main,
    "start": start.main,
    "tensor": tensor.main,
    "trainer": compare.main,
    "tuning": tuning.main,
    "watching": watching.main,
}


def main(argv: list[str]) -> int:
    command = _COMMANDS.get(argv[0]) if argv else None
    return times.main(argv) if command is None else command(argv[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
