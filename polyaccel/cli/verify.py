"""`polyaccel verify script.py`: a few steps of a training, compared with plain torch or JAX."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from polyaccel.cli.argument_types import whole_number
from polyaccel.cli.options import add_options
from polyaccel.cli.parser import describe
from polyaccel.errors import PolyaccelError
from polyaccel.verify.compare import last_of_backward
from polyaccel.verify.prove import Proof, prove
from polyaccel.verify.variant import VARIABLE, Record, Variant

_DESCRIPTION = """\
Compare a training with plain torch or plain JAX: the script runs a few optimizer steps several times, once with the
engine's config and otherwise without the engine, on the same ranks and batches, in float32. Gradients, norms, updates,
optimizer states, buffers, attributes, generators and losses have to agree within the rounding that plain runs show.
Where they do not, the command finds the rewrite to blame (tensor, sequence, expert or pipeline parallelism, tiles,
recomputation, ZeRO's shards) and the first parameter that differs. The script is ended after these steps. What it
writes before that, each run writes. Checkpoints are kept apart from the script's own."""
_USAGE = "polyaccel verify [options] [options of polyaccel run] script.py [arguments of the script]"
_OWN_OPTIONS = ("--steps", "--engines")
_LAST_LINES = 12
_MOST_FINDINGS = 5


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `verify` to the command."""
    parser = subparsers.add_parser(
        "verify",
        help="compare the first steps with plain torch or JAX",
        description=_DESCRIPTION,
        usage=_USAGE,
        allow_abbrev=False,
    )
    count = whole_number("a number of 1 or more", 1)
    parser.add_argument("--steps", type=count, default=2, metavar="N", help="optimizer steps to compare; default: 2")
    parser.add_argument(
        "--engines", type=count, default=1, metavar="N", help="engines that the script makes one after the other"
    )
    add_options(parser)
    describe(
        parser,
        examples=("polyaccel verify --ranks 2 train.py",),
        codes={0: "the training equals plain torch or JAX", 1: "it differs, or an error, stated on standard error"},
        missing="give a script: polyaccel verify [options] train.py",
    )
    parser.keeps_words = True  # type: ignore[attr-defined]
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Verify the program. The exit code is 1 where it differs. Raises PolyaccelError where it does not run."""
    from polyaccel.launch.program import check_not_nested

    check_not_nested(os.environ)
    command = (sys.executable, "-m", "polyaccel", "run", *_words_of_run(args))
    with tempfile.TemporaryDirectory(prefix="polyaccel-verify-") as folder:
        base = Variant("", steps=args.steps, engines=args.engines)
        proof = prove(lambda variant: _run(command, variant, Path(folder)), variant=base)
    print(report(proof, args.steps))
    return 0 if proof.is_proven else 1


def _words_of_run(args: argparse.Namespace) -> list[str]:
    """The words of the command without the options that are not those of `polyaccel run`."""
    words = list(args.words)
    options, script = words[: len(words) - 1 - len(args.arguments)], words[len(words) - 1 - len(args.arguments) :]
    kept: list[str] = []
    left = iter(options)
    for word in left:
        if word in _OWN_OPTIONS:
            next(left, None)
        elif not word.startswith(tuple(f"{option}=" for option in _OWN_OPTIONS)):
            kept.append(word)
    return kept + script


def _run(command: Sequence[str], variant: Variant, folder: Path) -> list[Record]:
    """The records of all ranks of one run. Raises PolyaccelError for a run that recorded nothing."""
    own = folder / variant.name.replace(" ", "_")
    own.mkdir()
    print(f"polyaccel: running {variant.name}", file=sys.stderr)
    environment = {**os.environ, VARIABLE: replace(variant, folder=str(own)).to_json()}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    files = sorted(own.glob("rank*.npz"))
    if done.returncode or not files:
        lines = done.stdout.decode(errors="replace").splitlines()[-_LAST_LINES:]
        why = f"ended with {done.returncode}" if done.returncode else f"ended before {variant.steps} steps"
        raise PolyaccelError(
            "\n".join([f"the run {variant.name!r} {why}", *lines]),
            hint="run the script alone first; --steps must not exceed its optimizer steps",
            value=variant.name,
        )
    return [Record.read(file) for file in files]


def report(proof: Proof, steps: int) -> str:
    """Return a proof as text: verdict, findings, and the rewrites with what they changed."""
    if proof.is_proven:
        within = f"the largest difference is {proof.worst:.1f} spreads of {proof.limit:.0f}"
        lines = [f"PROVEN: {proof.quantities} quantities of {steps} steps equal plain {proof.plain}; {within}"]
    else:
        named = f" The rewrite to blame: {', '.join(proof.blamed)}." if proof.blamed else ""
        lines = [f"DIFFERENT from plain {proof.plain}: {len(proof.findings)} of {proof.quantities} quantities.{named}"]
        lines += [f"  {finding}" for finding in proof.findings[:_MOST_FINDINGS]]
        if (last := last_of_backward(proof.findings)) is not None:
            lines.append(f"  The loss agrees: look at the backward pass of {last.parameter}, or of what follows it.")
        lines += [f"  ranks differ in {key}" for key in proof.differing[:_MOST_FINDINGS]]
    if proof.is_weak:
        share = f"{proof.loss_noise:.1e}"
        lines.append(f"WEAK: losses of plain runs differ by {share} of the loss; let the script seed its generators")
    for name, count in proof.acted.items():
        lines.append(f"  {name}: {f'changed {count} modules and parameters' if count else 'did not act: not proven'}")
    return "\n".join(lines)
