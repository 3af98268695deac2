"""`polyaccel config new`: a config file from flags, or from the answers to a few questions."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from polyaccel.cli.argument_types import non_negative, positive, whole_number
from polyaccel.cli.parser import describe
from polyaccel.errors import PolyaccelError

_PLACES = ("cpu", "nvme")
_QUESTIONS: tuple[tuple[str, str, str], ...] = (
    ("stage", "ZeRO stage: 0 replicates; 1 shards optimizer states, 2 gradients too, 3 parameters too", "2"),
    ("precision", "precision: fp32, bf16 or fp16", "bf16"),
    ("offload", "offload of optimizer states: none, cpu or nvme", "none"),
    ("micro_batch", "samples of a rank's micro-batch", "8"),
    ("lr", "learning rate of AdamW", "3e-4"),
)
"""What is asked where no flag is given: the option, the question and its default."""
_count = whole_number("a number of 1 or more", 1)


def add_parser(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    what = "write a config from flags; without flags, on a terminal, ask"
    parser = verbs.add_parser("new", help=what, description=what)
    parser.add_argument("file", type=Path, nargs="?", default=Path("config.json"), help="default: %(default)s")
    parser.add_argument("--force", action="store_true", help="replace a file that exists")
    parser.add_argument("--stage", type=int, choices=range(4), help="ZeRO stage (default: 2)")
    precision = parser.add_mutually_exclusive_group()
    for name in ("bf16", "fp16"):
        precision.add_argument(f"--{name}", dest="precision", action="store_const", const=name, help=f"train in {name}")
    for option, purpose in (("--offload", "optimizer states"), ("--offload-param", "parameters, at stage 3")):
        shown = f"where {purpose} rest: cpu (default) or nvme"
        parser.add_argument(option, nargs="?", const="cpu", type=_place, metavar="PLACE", help=shown)
    parser.add_argument("--nvme-path", metavar="DIR", help="folder for offload to nvme (default: offload)")
    parser.add_argument("--batch", type=_count, metavar="N", help="samples of an optimizer step, all ranks together")
    parser.add_argument("--micro-batch", type=_count, metavar="N", help="samples of a rank's micro-batch (default: 8)")
    parser.add_argument("--accumulation", type=_count, metavar="N", help="micro-batches of an optimizer step")
    parser.add_argument("--lr", type=positive("a number above 0"), metavar="RATE", help="of AdamW (default: 3e-4)")
    parser.add_argument("--clip", type=non_negative("a number of 0 or more"), metavar="NORM", help="gradient clipping")
    parser.add_argument("--tensor", type=_count, metavar="N", help="ranks that share each layer")
    parser.add_argument("--sequence", type=_count, metavar="N", help="ranks that share each sequence")
    parser.add_argument("--run-dir", metavar="DIR", help="folder for metrics, log and live page (polyaccel watch)")
    describe(
        parser,
        examples=("polyaccel config new", "polyaccel config new --stage 3 --bf16 --offload zero3.json"),
    )
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Write the file; the exit code is 0. Raises PolyaccelError for a file that exists, and settings that contradict
    each other."""
    if args.file.exists() and not args.force:
        raise PolyaccelError(f"{args.file} exists", hint="name another file, or give --force", value=str(args.file))
    flags = set(vars(args)) - {"file", "force", "verb", "config_verb", "func", "verbose"}
    if sys.stdin.isatty() and all(getattr(args, name) is None for name in flags):
        _ask(args, input)
    tree = config_tree(args)
    from polyaccel.config import load_config

    load_config(tree)
    try:
        args.file.write_text(json.dumps(tree, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise PolyaccelError(f"{args.file} cannot be written: {error}", hint="name another file") from error
    print(f"{args.file}: written. `polyaccel config check {args.file} --ranks N` shows what it resolves to.")
    return 0


def config_tree(args: argparse.Namespace) -> dict[str, Any]:
    """The config that the options ask for, as JSON has it."""
    tree: dict[str, Any] = {}
    if args.batch is not None:
        tree["train_batch_size"] = args.batch
    if args.micro_batch is not None or args.batch is None:
        tree["train_micro_batch_size_per_gpu"] = args.micro_batch or 8
    if args.accumulation is not None:
        tree["gradient_accumulation_steps"] = args.accumulation
    tree["optimizer"] = {"type": "AdamW", "params": {"lr": args.lr or 3e-4}}
    if args.clip is not None:
        tree["gradient_clipping"] = args.clip
    if args.precision is not None:
        tree[args.precision] = {"enabled": True}
    zero: dict[str, Any] = {"stage": 2 if args.stage is None else args.stage}
    for key, place in (("offload_optimizer", args.offload), ("offload_param", args.offload_param)):
        if place is not None:
            zero[key] = {"device": place}
            if place == "nvme":
                zero[key]["nvme_path"] = args.nvme_path or "offload"
    tree["zero_optimization"] = zero
    if args.tensor is not None:
        tree["tensor_parallel"] = {"autotp_size": args.tensor}
    if args.sequence is not None:
        tree["sequence_parallel_size"] = args.sequence
    if args.run_dir is not None:
        tree["run_dir"] = args.run_dir
    return tree


def _ask(args: argparse.Namespace, answer: Callable[[str], str]) -> None:
    """Set the options of `_QUESTIONS` to what `answer` returns; an empty answer is the default. Raises PolyaccelError
    for an answer of another kind."""
    readers: dict[str, Callable[[str], Any]] = {
        "stage": whole_number("a stage from 0 to 3", 0, 3),
        "precision": _precision,
        "offload": lambda text: None if text == "none" else _place(text),
        "micro_batch": _count,
        "lr": positive("a number above 0"),
    }
    for name, question, default in _QUESTIONS:
        try:
            text = answer(f"{question} [{default}]: ").strip() or default
        except EOFError:
            text = default
        try:
            setattr(args, name, readers[name](text))
        except argparse.ArgumentTypeError as error:
            raise PolyaccelError(f"{name}: {error}", hint="start again", value=text) from None


def _place(text: str) -> str:
    if text not in _PLACES:
        raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(_PLACES)}")
    return text


def _precision(text: str) -> str | None:
    if text not in ("fp32", "bf16", "fp16"):
        raise argparse.ArgumentTypeError(f"{text!r} is not one of fp32, bf16, fp16")
    return None if text == "fp32" else text
