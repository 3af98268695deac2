"""The driver of `make mutants`: which tests go with which file, and which places of a source are changed."""

from __future__ import annotations

import sys
from pathlib import Path
from textwrap import dedent

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def _driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "mutants"))
    for name in ("packages", "sites"):
        sys.modules.pop(name, None)


def test_every_file_has_a_package_and_every_package_tests() -> None:
    import packages

    assert all((ROOT / test).exists() for tests in packages.PACKAGES.values() for test in tests)
    files = packages.sources()
    assert len(files) > 50
    assert {file.split("/")[1] for file in files} == {"zero", "comm", "checkpoint"}
    assert all(any(packages.is_in(file, package) for file in files) for package in packages.PACKAGES)
    tests = packages.tests_of("polyaccel/comm/wrappers/quantized.py", packages.ROOT)
    assert tests[0] == "tests/threads/comm/test_comm_quantized.py"
    assert len(set(tests)) == len(tests)
    assert all((ROOT / test).is_file() for test in tests)


SOURCE = dedent(
    """
    from abc import abstractmethod
    from dataclasses import dataclass
    from typing import TYPE_CHECKING

    if TYPE_CHECKING and 1 < 2:
        import nothing

    @dataclass(frozen=True)
    class Pair:
        one: int | None

        @property
        def double(self) -> int | str:
            return self.one * 2

        @abstractmethod
        def call(self, *args: int, other: float = 1.0) -> None: ...

    def run(pair: Pair | None) -> object:
        return pair.call(*[3], other=4.0) if pair is not None else None
    """
)


def test_only_what_means_something_is_changed() -> None:
    pytest.importorskip("cosmic_ray", reason="the environment of `make mutants` has it")
    import sites

    places = sites.sites_of("file.py", SOURCE)
    changes = {(place[0].line, one.operator.removeprefix("core/").split("_")[0]) for place in places for one in place}
    line = {text.strip(): number for number, text in enumerate(SOURCE.splitlines(), 1)}
    assert {number for number, _ in changes} == {
        line["@property"],
        line["return self.one * 2"],
        line["def call(self, *args: int, other: float = 1.0) -> None: ..."],
        line["return pair.call(*[3], other=4.0) if pair is not None else None"],
    }
    assert (line["return self.one * 2"], "ReplaceBinaryOperator") in changes
    assert (line["@property"], "RemoveDecorator") in changes


def test_a_mutant_is_one_change_of_the_program() -> None:
    pytest.importorskip("cosmic_ray", reason="the environment of `make mutants` has it")
    import sites

    for place in sites.sites_of("file.py", SOURCE):
        for site in place:
            changed = sites.mutated(SOURCE, site)
            if changed is None:
                continue
            pairs = zip(SOURCE.splitlines(), changed.splitlines(), strict=False)
            assert changed != SOURCE
            assert sum(one != other for one, other in pairs) == 1 or "Decorator" in site.operator
