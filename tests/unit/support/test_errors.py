"""Errors outlive the process that raises them: a pool of ranks hands them on pickled."""

from __future__ import annotations

import pickle

import pytest

from polyaccel.errors import (
    CheckpointError,
    CommError,
    CommTimeout,
    ConfigError,
    InvariantError,
    LaunchError,
    LossScaleError,
    PluginNotFound,
    PolyaccelError,
    Problem,
)

KINDS = [CheckpointError, InvariantError, LaunchError, LossScaleError, PluginNotFound, PolyaccelError]


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_is_pickled_whole(kind: type[PolyaccelError]) -> None:
    error = kind("what failed: 3", hint="do this", value=(3, "x"))
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind
    assert (str(copy), copy.args, copy.hint, copy.value) == (str(error), error.args, "do this", (3, "x"))


def test_problems_of_a_config_and_missing_ranks_are_pickled() -> None:
    error = ConfigError(
        [Problem("a.b", 1, "is wrong", "leave it out"), Problem("c", None, "is missing")], source="file"
    )
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.problems, copy.source) == (str(error), error.problems, "file")
    for kind in (CommError, CommTimeout):
        lost = pickle.loads(pickle.dumps(kind("gone", missing_ranks=[1, 2])))
        assert (type(lost), lost.missing_ranks) == (kind, (1, 2))


def test_values_that_cannot_be_pickled_are_handed_on_as_text() -> None:
    def local() -> None: ...

    error = ConfigError([Problem("a", local, "is no number"), Problem("b", 2, "is odd")])
    copy = pickle.loads(pickle.dumps(error))
    assert str(copy) == str(error)
    assert [problem.value for problem in copy.problems] == [repr(local), 2]
    assert pickle.loads(pickle.dumps(LaunchError("x", value=[local, 1]))).value == [repr(local), 1]
