"""What becomes of every name and config key of DeepSpeed 0.19.8, from the table that the drop-in's modules are made of.

`python docs/generate/compatibility.py` prints the page.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "plugins" / "polyaccel-deepspeed"))

from polyaccel_deepspeed.names.entry import Status
from polyaccel_deepspeed.names.internals import MEMBERS_ABSENT
from polyaccel_deepspeed.names.surface import MODULES
from polyaccel_deepspeed.refused_keys import REMOVED

from polyaccel.config import Config
from polyaccel.config.keys import walk_keys
from polyaccel.config.unsupported_keys import ABSENT, BELOW, Absent


def compatibility() -> str:
    """The tables of the page, as Markdown."""
    return "\n".join([*_names(), *_members(), *_keys()])


def _names() -> Iterator[str]:
    yield "## Names { #names }\n"
    for module, entry in MODULES.items():
        if not entry.names:
            continue
        yield f"### `{module}` {{ #{module} }}\n"
        yield f"{entry.doc}\n\n| name | status | |\n|---|---|---|"
        for name, one in sorted(entry.names.items(), key=lambda item: (list(Status).index(item[1].status), item[0])):
            yield f"| `{name}` | {one.status.value} | {one.why} |"
        yield ""


def _members() -> Iterator[str]:
    for owner, absent in MEMBERS_ABSENT.items():
        yield f"## `{owner}` {{ #{owner}-members }}\n"
        yield "Every public member exists, with DeepSpeed's arguments, except for these, which are an AttributeError:\n"
        yield "| member | status | |\n|---|---|---|"
        for name, one in absent.items():
            yield f"| `{name}` | {one.status.value} | {one.why} |"
        yield ""


def _keys() -> Iterator[str]:
    yield "## Config keys { #keys }\n"
    yield "[The reference](reference/config.md) explains each key.\n\n| key | status | |\n|---|---|---|"
    found = {
        key.dotted: ("yes", "")
        for key in walk_keys(Config)
        if not key.is_section and "polyaccel's own" not in (key.field.description or "")
    }
    for entry in ABSENT:
        for pattern in entry.keys:
            key = pattern.removesuffix(BELOW)
            found[key] = _absent(entry)
    found |= {key: ("never", f"{feature}, which DeepSpeed has removed") for key, feature in REMOVED.items()}
    for key in sorted(found):
        status, why = found[key]
        yield f"| `{key}` | {status} | {why} |"


def _absent(entry: Absent) -> tuple[str, str]:
    if entry.is_tuning:
        return "accepted", entry.feature
    return "not yet", entry.feature


if __name__ == "__main__":
    print(compatibility())
