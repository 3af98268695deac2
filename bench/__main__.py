"""`python -m bench [CASE]`: step times, or the case of that name in `bench.cases`."""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType

from bench.runner import run_case

NAMES = (
    *("all-to-all", "experts", "generation", "imports", "jax", "kernels", "longest", "one-device", "ownership"),
    *(
        "pipeline",
        "replica",
        "saves",
        "sequence",
        "slow-link",
        "start",
        "tensor",
        "trainer",
        "tuning",
        "verify",
        "watching",
    ),
    *("verify", "watching", "weights"),
)
CASES = {name: name.replace("-", "_") for name in NAMES}
CASES |= {"backends": "collectives", "comm": "collectives", "hosts": "steps", "memory": "steps", "steps": "steps"}
"""The module of each command."""


def main(argv: list[str]) -> int:
    name, rest = (argv[0], argv[1:]) if argv and argv[0] in CASES else ("steps", argv)
    module: ModuleType = import_module(f"bench.cases.{CASES[name]}")
    if hasattr(module, "main"):
        return int(module.main(rest))
    return run_case(module.CASES[name], rest)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
