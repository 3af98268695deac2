"""The table of broken variants: which row of `polyaccel plugins check` has to catch each, and what it has to say."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from polyaccel.registry import PluginGroup


class Broken:
    """Gives a class of a broken plugin its name: that of the class, in small letters with hyphens."""

    name: str

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        cls.name = "-".join(re.findall("[A-Z][a-z0-9]*", cls.__name__)).lower()


def named(module: Mapping[str, Any], base: type) -> dict[str, type[Any]]:
    """The broken plugins of a module, by name."""
    kinds = [kind for kind in module.values() if isinstance(kind, type) and issubclass(kind, Broken)]
    return {kind.name: kind for kind in kinds if issubclass(kind, base) and kind.__module__ == module["__name__"]}


@dataclass(frozen=True)
class Variant:
    """`kind` is the plugin, which the test `row` of its contract has to catch, and say every piece of `says`.

    `own_process`: it crashes or hangs, or is about processes, and is tried by name alone.
    """

    group: PluginGroup
    kind: type[Any]
    row: str
    says: tuple[str, ...]
    own_process: bool = False

    @property
    def title(self) -> str:
        return self.row.removeprefix("test_").replace("_", " ")

    def __str__(self) -> str:
        return f"{self.kind.__name__}-{self.row.removeprefix('test_')}"

    def as_row(self, seconds: float) -> str:
        """The variant's line of the table, once it was caught after `seconds`."""
        name, said = f"{self.group.noun} `{self.kind.__name__}`", f"`{' ... '.join(self.says)}`"
        return f"| {name} | {self.title} | {said} | {seconds:.1f} |"


HEAD = ["| broken plugin | caught by the row | which says | s |", "|---|---|---|---:|"]
"""The head of the table, in Markdown."""
