"""What becomes of every name and config key of DeepSpeed 0.19.8, from the table that the drop-in's modules are made of.

`python docs/generate/compatibility.py` prints the page.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "plugins" / "polyaccel-deepspeed"))

from polyaccel_deepspeed.keys.answers import answer_to, answers
from polyaccel_deepspeed.names.entry import Status
from polyaccel_deepspeed.names.internals import MEMBERS_ABSENT
from polyaccel_deepspeed.names.packages import ABSENT_MODULES, absent_module
from polyaccel_deepspeed.names.surface import MODULES
from polyaccel_deepspeed.version import __version__

FACTS = json.loads(
    (Path(__file__).parents[2] / "tests" / "unit" / "dropin" / "deepspeed_facts.json").read_text(encoding="utf-8")
)
STATES = [one.value for one in Status]


def compatibility() -> str:
    """The tables of the page, as Markdown."""
    return "\n".join([*_counts(), *_names(), *_members(), *_keys(), *_modules()])


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
    known = answers()
    for key in FACTS["keys"]:
        answer = answer_to(key, known)
        assert answer is not None  # a test of the facts holds
        yield f"| `{key}` | {answer.outcome.value} | {answer.why} |"


def _modules() -> Iterator[str]:
    yield "\n## Modules that cannot be imported { #modules }\n"
    yield "The longest name counts for a module below it.\n\n| modules | status | |\n|---|---|---|"
    for prefix, entry in sorted(ABSENT_MODULES.items()):
        yield f"| `{prefix}` | {entry.status.value} | {entry.why} |"


def _counts() -> Iterator[str]:
    """The counts of all tables, over what a DeepSpeed has."""
    known = answers()
    keys = Counter(answer.outcome.value for key in FACTS["keys"] if (answer := answer_to(key, known)) is not None)
    shared = [
        (name, one) for name, one in MODULES.items() if name in FACTS["modules"] or name in FACTS["source_modules"]
    ]
    names = Counter(one.status.value for _, entry in shared for one in entry.names.values())
    absent = [absent_module(name) for name in FACTS["every_module"] if name not in MODULES]
    modules = Counter(one.status.value for one in absent if one is not None)
    modules["yes"] = len(FACTS["every_module"]) - len(absent)
    yield "## Counts { #counts }\n"
    ours = __version__.partition("+polyaccel.")[2]
    yield f"DeepSpeed {FACTS['version']}, whose source was read on {FACTS['read_on']}, and polyaccel {ours}.\n"
    yield "| | all | " + " | ".join(STATES) + " |\n|---|---|" + "---|" * len(STATES)
    for what, counted in (("config keys", keys), ("names", names), ("modules", modules)):
        yield f"| {what} | {counted.total()} | " + " | ".join(str(counted[one]) for one in STATES) + " |"
    for what, count in (("options of `deepspeed`", "options"), ("commands", "scripts")):
        yield f"| {what} | {len(FACTS[count])} | {len(FACTS[count])} |" + " |" * (len(STATES) - 1)
    yield ""


if __name__ == "__main__":
    print(compatibility())
