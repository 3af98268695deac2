"""The console shows the log of a script that has configured none, and adds nothing to one that has."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from polyaccel.errors import ConfigError
from polyaccel.observability.console import VARIABLE, ConsoleHandler, show_log

LOGGER = logging.getLogger("polyaccel")
LINE = logging.getLogger("polyaccel.engine.recording")


@pytest.fixture(autouse=True)
def unconfigured(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Logging as a script finds it: a root without pytest's handlers, and nothing that other tests have left."""
    monkeypatch.setattr(LOGGER, "parent", logging.RootLogger(logging.WARNING))
    monkeypatch.setattr(LOGGER, "handlers", [])
    monkeypatch.delenv(VARIABLE, raising=False)
    before = LOGGER.level
    LOGGER.setLevel(logging.NOTSET)
    yield
    LOGGER.setLevel(before)


def say() -> None:
    LINE.debug("details")
    LINE.info("step %d", 1)
    LINE.warning("careful")


def test_rank_0_shows_information_without_being_asked(capsys: pytest.CaptureFixture[str]) -> None:
    show_log(0, None)
    say()
    assert capsys.readouterr() == ("", "[polyaccel] step 1\n[polyaccel] warning: careful\n")


def test_other_ranks_show_warnings_with_their_rank(capsys: pytest.CaptureFixture[str]) -> None:
    show_log(3, "debug")
    say()
    assert capsys.readouterr().err == "[polyaccel, rank 3] warning: careful\n"


@pytest.mark.parametrize(("level", "lines"), [("debug", 3), ("info", 2), ("warning", 1), ("error", 0)])
def test_the_level_of_the_config(level: str, lines: int, capsys: pytest.CaptureFixture[str]) -> None:
    show_log(0, level)
    say()
    assert len(capsys.readouterr().err.splitlines()) == lines


def test_a_second_engine_adds_no_second_line(capsys: pytest.CaptureFixture[str]) -> None:
    for rank in (1, 0, 2):  # ranks may be threads of one process
        show_log(rank, None)
    say()
    assert capsys.readouterr().err == "[polyaccel] step 1\n[polyaccel] warning: careful\n"


def test_a_level_that_the_application_chose_stays(capsys: pytest.CaptureFixture[str]) -> None:
    LOGGER.setLevel(logging.ERROR)
    show_log(0, None)
    say()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("name", ["root", "polyaccel"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_an_application_that_configured_logging_sees_each_line_once(
    name: str, when: str, capsys: pytest.CaptureFixture[str]
) -> None:
    configured = LOGGER if name == "polyaccel" else LOGGER.parent
    assert configured is not None
    if when == "before":
        configured.addHandler(logging.StreamHandler())
        show_log(0, "info")
    else:
        show_log(0, "info")
        configured.addHandler(logging.StreamHandler())
    say()
    assert capsys.readouterr().err == "step 1\ncareful\n"
    assert LOGGER.propagate
    assert any(isinstance(handler, ConsoleHandler) for handler in LOGGER.handlers) == (when == "after")


def test_the_variable_goes_before_the_config_on_every_rank(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(VARIABLE, "DEBUG")
    show_log(1, "error")
    say()
    assert [line.split("] ")[1] for line in capsys.readouterr().err.splitlines()] == [
        "details",
        "step 1",
        "warning: careful",
    ]


def test_off_adds_no_handler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "off")
    show_log(0, "info")
    assert LOGGER.handlers == []
    monkeypatch.setenv(VARIABLE, "loud")
    with pytest.raises(ConfigError) as caught:
        show_log(0, None)
    assert [(problem.key, problem.value) for problem in caught.value.problems] == [("POLYACCEL_LOG", "loud")]
