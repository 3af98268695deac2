"""The command-line arguments that training scripts share."""

from __future__ import annotations

from argparse import ArgumentParser


def add_config_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Add `--deepspeed` and `--deepspeed_config`, which `initialize(args=...)` reads, and return `parser`."""
    group = parser.add_argument_group("polyaccel")
    group.add_argument(
        "--deepspeed", action="store_true", help="accepted for scripts that pass it; the engine is always on"
    )
    group.add_argument("--deepspeed_config", metavar="FILE", help="the JSON config")
    return parser
