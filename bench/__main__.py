"""`python -m bench`: step times; `python -m bench backends`, `comm`, `imports`, `jax`, `kernels` and `memory`."""

from __future__ import annotations

import sys

from bench import backends, comm, imports, jax, kernels, memory, steps

_COMMANDS = {
    "backends": backends.main,
    "comm": comm.main,
    "imports": imports.main,
    "jax": jax.main,
    "kernels": kernels.main,
    "memory": memory.main,
}


def main(argv: list[str]) -> int:
    command = _COMMANDS.get(argv[0]) if argv else None
    return steps.main(argv) if command is None else command(argv[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
