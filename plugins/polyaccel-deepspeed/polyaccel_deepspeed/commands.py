"""The commands of the package: `deepspeed`, `ds_report`, `ds_bench`, `ds_io`, `ds_ssh`, `zero_to_fp32` and others."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Sequence

from polyaccel.cli.streams import flush_output, open_closed_streams
from polyaccel.errors import PolyaccelError
from polyaccel_deepspeed.hosts import run_on_hosts, ssh_parser
from polyaccel_deepspeed.launcher import launch_arguments, launch_ranks
from polyaccel_deepspeed.resources import require_hosts

OPS = ("all_reduce", "all_gather", "all_to_all", "broadcast", "reduce_scatter", "pt2pt")
"""What `ds_bench` times."""


def launch(args: Sequence[str] | None = None) -> int:
    """`deepspeed [options] script.py ...`: the ranks of a script. Returns the job's exit code."""
    open_closed_streams()
    given = launch_arguments(args)
    code = _shown("deepspeed", lambda: launch_ranks(given))
    flush_output()
    return code


def launch_or_raise(args: Sequence[str] | None = None) -> int:
    """`deepspeed.launcher.runner.main`: as `launch`, and wrong hosts or slots are a ValueError, as in DeepSpeed."""
    require_hosts(launch_arguments(args))
    return launch(args)


def report(argv: Sequence[str] | None = None) -> int:
    """`ds_report`: `polyaccel doctor`, then versions and places of packages."""
    from polyaccel_deepspeed.env_report import cli_main

    return cli_main(argv)


def bench(argv: Sequence[str] | None = None) -> int:
    """`ds_bench [options of deepspeed] [options]`: time collectives of the ranks. Returns the job's exit code."""
    given = list(sys.argv[1:] if argv is None else argv)
    launchers = bench_parser().parse_known_args(given)[1]  # a subsequence of what was given
    left, own = list(launchers), []
    for word in given:
        if left and word == left[0]:
            left.pop(0)
        else:
            own.append(word)
    return launch([*launchers, "--module", "polyaccel_deepspeed.bench", *own])


def file_speed(argv: Sequence[str] | None = None) -> int:
    """`ds_io --folder DIR --io_size 400M`: how fast files are written, and read."""
    from polyaccel_deepspeed.file_speed import io

    return _shown("ds_io", lambda: io(argv))


def file_tuning(argv: Sequence[str] | None = None) -> int:
    """`ds_nvme_tune --nvme_dir DIR`: the number of threads with which files are fastest."""
    from polyaccel_deepspeed.file_speed import tune

    return _shown("ds_nvme_tune", lambda: tune(argv))


def node_launch(argv: Sequence[str] | None = None) -> int:
    """`python -m deepspeed.launcher.launch --world_info=... script.py ...`: the ranks of one host."""
    from polyaccel_deepspeed.node_launcher import main

    return _shown("deepspeed.launcher.launch", lambda: main(argv))


def universal(argv: Sequence[str] | None = None) -> int:
    """`python -m deepspeed.checkpoint.ds_to_universal`: a checkpoint as DeepSpeed's universal one."""
    from polyaccel_deepspeed.universal import main, parse_arguments

    return _shown("ds_to_universal", lambda: main(parse_arguments(argv)))


def ssh(argv: Sequence[str] | None = None) -> int:
    """`ds_ssh [-f hostfile] command ...`: the command on every host. Returns the largest exit code."""
    given = ssh_parser().parse_args(argv)
    return _shown("ds_ssh", lambda: run_on_hosts(given.hostfile, given.command, shlex.split(given.ssh_args)))


def bench_parser() -> argparse.ArgumentParser:
    """The options of `ds_bench` that are not the launcher's."""
    parser = argparse.ArgumentParser(prog="ds_bench", description=bench.__doc__, allow_abbrev=False)
    parser.add_argument("--local_rank", type=int, default=0, help="set by the launcher")
    parser.add_argument("--trials", type=int, default=5, help="timed (default: %(default)s)")
    parser.add_argument("--warmups", type=int, default=1, help="before that (default: %(default)s)")
    parser.add_argument("--maxsize", type=int, default=24, help="most bytes, as a power of 2 (default: %(default)s)")
    parser.add_argument("--scan", action="store_true", help="all powers of 2 up to it, not this one alone")
    parser.add_argument("--bw-unit", choices=("Gbps", "GBps"), default="Gbps", help="(default: %(default)s)")
    parser.add_argument(
        "--dtype", choices=("float", "float32", "float16", "bfloat16"), default="float", help="(default: %(default)s)"
    )
    for op in OPS:
        parser.add_argument(f"--{op.replace('_', '-')}", action="store_true", help="this one; by default all are timed")
    return parser


def zero_to_fp32(argv: Sequence[str] | None = None) -> int:
    """`zero_to_fp32 CHECKPOINT_DIR OUTPUT`: a checkpoint's whole weights in float32."""
    parser = argparse.ArgumentParser(prog="zero_to_fp32", description=zero_to_fp32.__doc__)
    parser.add_argument("checkpoint_dir", help="what save_checkpoint was given")
    parser.add_argument("output_dir", help="a folder, or a file that ends in .bin, .pt, .ckpt or .safetensors")
    parser.add_argument("--max_shard_size", default="5GB", help="the most of a file (default: %(default)s)")
    parser.add_argument("--safe_serialization", action="store_true", help="write safetensors")
    parser.add_argument("-t", "--tag", help="the checkpoint, by default the one that `latest` names")
    parser.add_argument("--exclude_frozen_parameters", action="store_true", help="write the trained ones alone")
    parser.add_argument("-d", "--debug", action="store_true", help="accepted")
    given = parser.parse_args(argv)

    def convert() -> int:
        from polyaccel_deepspeed.checkpoint import convert_zero_checkpoint_to_fp32_state_dict

        convert_zero_checkpoint_to_fp32_state_dict(
            given.checkpoint_dir,
            given.output_dir,
            given.max_shard_size,
            given.safe_serialization,
            given.tag,
            given.exclude_frozen_parameters,
        )
        return 0

    return _shown("zero_to_fp32", convert)


def _shown(name: str, run: Callable[[], int]) -> int:
    """The exit code of `run()`, whose error becomes a sentence."""
    try:
        return run()
    except PolyaccelError as error:
        print(f"{name}: error: {error}", file=sys.stderr)
        return 1
