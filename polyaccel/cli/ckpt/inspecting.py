"""`polyaccel ckpt inspect`: the contents of a checkpoint, from its manifest alone."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any

from polyaccel.checkpoint import CheckpointReader, TensorEntry
from polyaccel.checkpoint.convert.locate import opened
from polyaccel.cli.ckpt.ls import step_of
from polyaccel.cli.ckpt.shown import add_storage, print_table
from polyaccel.utils.sizes import size


def add_parser(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    summary = "show the tensors and values of a checkpoint, and the run that saved it"
    parser = actions.add_parser("inspect", help=summary, description=summary)
    parser.add_argument("dir", metavar="DIR", help="a directory of checkpoints, or the folder of a tag in it")
    parser.add_argument("--tag", help="the checkpoint (default: the one that `latest` names)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_storage(parser)
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Print the contents; the exit code is 0. Raises CheckpointError for one that cannot be read."""
    reader = opened(args.dir, args.tag, args.storage)
    if args.json:
        print(json.dumps(as_json(reader), indent=2, default=_shown))
    else:
        _print(reader)
    return 0


def as_json(reader: CheckpointReader) -> dict[str, Any]:
    """All of the manifest, except for the places of bytes in files."""
    return {
        "tag": reader.tag,
        "folder": f"{reader.storage.location}/{reader.commit.folder}",
        "saved_at_s": reader.commit.saved_at_s,
        "ranks": reader.world_size,
        "not_finite": reader.not_finite,
        "tensors": [
            {
                "fqn": tensor.fqn,
                "kind": tensor.kind,
                "dtype": tensor.dtype.value,
                "shape": list(tensor.shape),
                "nbytes": _nbytes(tensor),
                "pieces": len(tensor.pieces),
                "is_cut": tensor.is_cut,
            }
            for tensor in reader.tensors()
        ],
        "scalars": reader.scalars,
        "about": reader.about,
    }


def _print(reader: CheckpointReader) -> None:
    tensors, about = reader.tensors(), reader.about
    saved_at = datetime.fromtimestamp(reader.commit.saved_at_s, timezone.utc)
    total = sum(map(_nbytes, tensors))
    ranks = "1 rank" if reader.world_size == 1 else f"{reader.world_size} ranks"
    print(f"{reader.storage.location}/{reader.commit.folder}")
    print(f"saved at {saved_at:%Y-%m-%d %H:%M:%S} UTC by {ranks}, step {_text(step_of(reader.scalars))}, {size(total)}")
    if reader.not_finite:
        print(f"not finite: {reader.not_finite}")
    for key in ("packages", "plugins", "mesh"):
        if isinstance(entry := about.get(key), dict) and entry:
            print(f"{key}: {', '.join(f'{name} {value}' for name, value in entry.items())}")
    if isinstance(entry := about.get("config"), dict):
        print(f"config, where it is not the default: {_text(_beyond(entry, _default_config()))}")
    print()
    kinds, nbytes = Counter[str](), Counter[str]()
    for tensor in tensors:
        kinds[tensor.kind] += 1
        nbytes[tensor.kind] += _nbytes(tensor)
    print_table(
        ("kind", "tensors", "size"), [(kind, str(kinds[kind]), size(nbytes[kind])) for kind in sorted(kinds)], (1, 2)
    )
    print()
    rows = [
        (tensor.fqn, tensor.kind, tensor.dtype.value, str(list(tensor.shape)), size(_nbytes(tensor)))
        for tensor in tensors
    ]
    print_table(("tensor", "kind", "type", "shape", "size"), rows, right=(4,))
    print()
    for key, value in reader.scalars.items():
        text = _text(value)
        print(f"{key} = {text if len(text) <= 200 else f'{text[:200]}... ({len(text)} characters)'}")


def _default_config() -> dict[str, Any]:
    from polyaccel.config import Config, resolve_config

    return resolve_config(Config(train_batch_size=1), world_size=1).public_tree()


def _beyond(tree: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The values of `tree` that `defaults` has not, section by section."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        default = defaults.get(key)
        if isinstance(value, dict) and isinstance(default, dict):
            if changed := _beyond(value, default):
                found[key] = changed
        elif key not in defaults or value != default:
            found[key] = value
    return found


def _nbytes(tensor: TensorEntry) -> int:
    return tensor.numel * tensor.dtype.itemsize


def _text(value: Any) -> str:
    return json.dumps(value, default=_shown)


def _shown(value: Any) -> str:
    """Bytes, which JSON does not have."""
    return f"<{len(value)} bytes>" if isinstance(value, bytes) else repr(value)
