"""Errors that are what DeepSpeed raises, too."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from polyaccel.errors import CheckpointError, PolyaccelError, ShardingError


class WrongCall(PolyaccelError, AssertionError):
    """A call in a place where it may not be."""


class UnusedParameters(ShardingError, AssertionError):
    """Parameters have no gradient, and `zero_optimization.ignore_unused_parameters` is false."""


class TagMismatch(CheckpointError, AssertionError):
    """Ranks save under several tags, and `checkpoint.tag_validation` is "Fail"."""


class NoFolder(CheckpointError, ValueError):
    """`save_dir` names no folder."""


@contextmanager
def deepspeeds_errors(save_dir: Any) -> Iterator[None]:
    """Raise `NoFolder` for no folder, and `TagMismatch` where the block refuses the tags of the ranks."""
    if save_dir is None or str(save_dir) == "":
        raise NoFolder(f"save_dir={save_dir!r}", hint="name a folder", value=save_dir)
    try:
        yield
    except CheckpointError as error:
        tags = error.value
        if isinstance(tags, tuple) and all(isinstance(tag, str) for tag in tags):
            raise TagMismatch(error.message, hint=error.hint, value=tags) from error
        raise


@contextmanager
def unused_parameters() -> Iterator[None]:
    """Raise `UnusedParameters` where the block refuses an update for parameters without a gradient."""
    key = "ignore_unused_parameters"
    try:
        yield
    except ShardingError as error:
        if key not in error.hint:
            raise
        raise UnusedParameters(f"{error.message}, and {key} is false", hint=error.hint, value=error.value) from error
