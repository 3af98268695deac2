"""What the table of names is made of: a `Name` with its `Status`, in a `Module`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum


class Status(Enum):
    """How much of a name there is."""

    YES = "yes"
    """It does what it does in DeepSpeed."""
    ACCEPTED = "accepted"
    """It can be used, and has no effect; `why` has the reason."""
    NO = "no"
    """Using it raises; `why` has what there is instead."""


@dataclass(frozen=True, slots=True)
class Name:
    """One name. `home` is `module:attribute` of what stands for it; without an attribute, the module itself."""

    status: Status
    home: str = ""
    why: str = ""


@dataclass(frozen=True, slots=True)
class Module:
    """One module of DeepSpeed's; `doc` is its docstring."""

    doc: str
    names: Mapping[str, Name] = field(default_factory=dict)


def yes(home: str, *names: str, **renamed: str) -> dict[str, Name]:
    """Names that stand in the module `home`, `renamed` ones under another name there."""
    same = {name: Name(Status.YES, f"{home}:{name}") for name in names}
    return same | {name: Name(Status.YES, f"{home}:{other}") for name, other in renamed.items()}


def accepted(why: str, home: str, *names: str, **renamed: str) -> dict[str, Name]:
    found = yes(home, *names, **renamed)
    return {name: Name(Status.ACCEPTED, one.home, why) for name, one in found.items()}


def never(why: str, *names: str) -> dict[str, Name]:
    return {name: Name(Status.NO, why=why) for name in names}
