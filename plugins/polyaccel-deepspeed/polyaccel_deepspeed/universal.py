"""`deepspeed.checkpoint.ds_to_universal`: a checkpoint of polyaccel or DeepSpeed as DeepSpeed's universal one."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from polyaccel.checkpoint.convert.exporting import chosen
from polyaccel.checkpoint.convert.importing import imported
from polyaccel.checkpoint.convert.locate import opened
from polyaccel.errors import CheckpointError
from polyaccel_deepspeed.exchange.exporting import write
from polyaccel_deepspeed.exchange.importing import read

_LATEST = "latest_universal"


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return DeepSpeed's options; those on workers and temporary files have no effect."""
    parser = argparse.ArgumentParser(prog="ds_to_universal", description=__doc__, allow_abbrev=False)
    parser.add_argument("--input_folder", required=True, help="a checkpoint: the folder of a tag, or the one above it")
    parser.add_argument("--output_folder", required=True, help="a folder that is new, next to which the tag is named")
    parser.add_argument("--num_extract_workers", type=int, default=4, help="accepted")
    parser.add_argument("--num_merge_workers", type=int, default=2, help="accepted")
    parser.add_argument("--keep_temp_folder", action="store_true", help="accepted")
    parser.add_argument("--no_strict", dest="strict", action="store_false", help="accepted: all is checked")
    parser.add_argument("--inject_missing_state", action="store_true", help="accepted")
    return parser.parse_args(argv)


def main(args: argparse.Namespace) -> int:
    """Write the universal checkpoint, and its name into `latest_universal` next to it. Return 0.

    Raises CheckpointError if the output exists, and for what `polyaccel ckpt export` refuses.
    """
    source, out = Path(args.input_folder), Path(args.output_folder)
    if out.exists():
        raise CheckpointError(f"{out} exists already", hint="name a new folder", value=str(out))
    out.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=out.parent) as held:
        room = Path(held)
        if any(source.glob("*_model_states.pt")):
            imported(read(source), str(room / "ours"), "imported", f"deepspeed: {source}", _unseen)
            source = room / "ours"
        reader = opened(str(source), None)
        kinds = sorted({tensor.kind for tensor in reader.tensors()})
        tensors = tuple(tensor for kind in kinds for tensor in chosen(reader, [kind], None))
        (room / "out").mkdir()
        write(room / "out", reader, tensors, _unseen)
        (room / "out" / reader.tag).rename(out)
        (out.parent / _LATEST).write_text(out.name, encoding="utf-8")
    print(f"{reader.tag}: {len(tensors)} tensors, in {out}")
    return 0


def _unseen(nbytes: int) -> None:
    """Show no progress."""
