"""What the registry accepts as a plugin, with metadata on disk and classes made on the spot."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from polyaccel.core.types import Probe
from polyaccel.errors import PluginConflict, PluginContractError, PluginNotFound
from polyaccel.registry import PluginGroup, find_plugin, list_plugins, load_plugin, probe_all

GROUP = PluginGroup.MONITORS


class Contract(ABC):
    API_VERSION = (3, 2)

    @abstractmethod
    def write(self) -> None: ...

    @classmethod
    def probe(cls) -> Probe:
        return Probe(usable=True, reason="a pencil is there", priority=7)


Offer = Callable[..., None]


@pytest.fixture
def offer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Offer:
    """Install a distribution `acme` 1.5 whose one module holds `plugins`, each an entry point of its own name."""
    monkeypatch.syspath_prepend(tmp_path)

    def install(lines: str = "", **plugins: object) -> None:
        module = ModuleType("acme")
        vars(module).update(plugins)
        monkeypatch.setitem(sys.modules, "acme", module)
        names = "".join(f"{name} = acme:{name}\n" for name in plugins)
        _write_metadata(tmp_path, "acme", f"[{GROUP.value}]\n{names}{lines}")

    return install


def _write_metadata(site: Path, package: str, entry_points: str) -> None:
    info = site / f"{package}-1.5.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.5\n")
    (info / "entry_points.txt").write_text(entry_points)


def plugin_class(module: str = "acme", base: type[Any] = Contract, **members: object) -> type[Any]:
    """A concrete plugin that lives in `module`."""
    defaults: Mapping[str, object] = {"__module__": module, "write": lambda self: None, "API_VERSION": (3, 2)}
    return type("Pencil", (base,), {**defaults, **members})


def load(name: str = "pencil") -> type[Any]:
    return load_plugin(GROUP, name, Contract, Contract.API_VERSION)


versions = st.tuples(st.integers(0, 4), st.integers(0, 4))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
@given(theirs=versions, ours=versions)
def test_an_equal_major_and_no_newer_minor_is_compatible(
    offer: Offer, theirs: tuple[int, int], ours: tuple[int, int]
) -> None:
    plugin = plugin_class(API_VERSION=theirs)
    offer(pencil=plugin)
    if theirs[0] == ours[0] and theirs[1] <= ours[1]:
        assert load_plugin(GROUP, "pencil", Contract, ours) is plugin
    else:
        upgrade = "polyaccel" if theirs > ours else "acme"
        with pytest.raises(PluginContractError) as caught:
            load_plugin(GROUP, "pencil", Contract, ours)
        assert caught.value.value == theirs
        assert all(part in str(caught.value) for part in ("1.5", upgrade))


@pytest.mark.parametrize("stated", ["3.2", [3, 2], (3,), (3, 2, 0), (True, 0), None, 3.2])
def test_an_api_version_is_a_pair_of_integers(offer: Offer, stated: object) -> None:
    offer(pencil=plugin_class(API_VERSION=stated))
    with pytest.raises(PluginContractError) as caught:
        load()
    assert "1.5" in str(caught.value)


def test_a_stranger_states_its_own_api_version_and_a_relative_inherits_it(offer: Offer) -> None:
    members = {"write": lambda self: None}
    stranger = type("Pencil", (Contract,), {**members, "__module__": "acme"})
    relative = type("Pencil", (Contract,), {**members, "__module__": Contract.__module__})
    heir = type("Pencil", (plugin_class(API_VERSION=(3, 1)),), {"__module__": "acme.more"})
    offer(stranger=stranger, relative=relative, heir=heir)
    assert load("relative") is relative
    assert load("heir") is heir
    with pytest.raises(PluginContractError) as caught:
        load("stranger")
    assert "API" in str(caught.value)
    assert {row.info.name: row.api_version for row in _ours()} == {"heir": (3, 1), "relative": (3, 2), "stranger": None}


def test_registering_with_the_abc_is_not_deriving_from_it(offer: Offer) -> None:
    class Registered:
        API_VERSION = (3, 2)

    Contract.register(Registered)
    offer(pencil=Registered)
    with pytest.raises(PluginContractError) as caught:
        load()
    assert "test_registry.Contract" in str(caught.value)


def test_a_class_with_a_falsy_metaclass_is_loaded_all_the_same(offer: Offer) -> None:
    class Falsy(type(Contract)):  # type: ignore[misc]
        def __bool__(cls) -> bool:
            return False

    plugin = Falsy("Pencil", (Contract,), {"__module__": "acme", "write": print, "API_VERSION": (3, 2)})
    offer(pencil=plugin)
    assert load() is plugin


def test_a_probe_answers_for_its_row(offer: Offer) -> None:
    absent = classmethod(lambda cls: Probe(usable=False, reason="no paper", priority=-1))
    offer(pencil=plugin_class(), crayon=plugin_class(probe=absent))
    crayon, pencil = _ours()
    assert (pencil.usable, pencil.reason, pencil.priority, pencil.error) == (True, "a pencil is there", 7, None)
    assert (crayon.usable, crayon.reason, crayon.priority, crayon.error) == (False, "no paper", -1, None)


@pytest.mark.parametrize("answer", [True, None, (True, "yes")])
def test_a_probe_that_answers_something_else_is_a_broken_plugin(offer: Offer, answer: object) -> None:
    offer(pencil=plugin_class(probe=classmethod(lambda cls: answer)))
    (row,) = _ours()
    assert not row.usable
    assert isinstance(row.error, PluginContractError)
    assert f"returned {answer!r}, not a polyaccel.core.types.Probe" in row.reason


def test_a_polyaccel_error_in_a_probe_keeps_its_traceback(offer: Offer) -> None:
    def probe(cls: type[Any]) -> Probe:
        raise PluginNotFound("the pencil case")

    offer(pencil=plugin_class(probe=classmethod(probe)))
    (row,) = _ours()
    assert "(package acme 1.5) failed while it was probed" in row.reason
    assert f"{Path(__file__).name}" in row.traceback.splitlines()[1]


def test_control_c_is_never_swallowed(offer: Offer) -> None:
    def interrupted(cls: type[Any]) -> Probe:
        raise KeyboardInterrupt

    offer(pencil=plugin_class(probe=classmethod(interrupted)))
    with pytest.raises(KeyboardInterrupt):
        _ours()

    class Interrupting(ModuleType):
        def __getattr__(self, name: str) -> object:
            raise KeyboardInterrupt if name == "pencil" else AttributeError(name)

    sys.modules["acme"] = Interrupting("acme")
    with pytest.raises(KeyboardInterrupt):
        load()


def test_one_distribution_that_declares_a_name_twice_is_a_conflict(offer: Offer) -> None:
    offer("pencil = acme:other\n", pencil=plugin_class())
    with pytest.raises(PluginConflict) as caught:
        find_plugin(GROUP, "pencil")
    assert caught.value.value == "pencil"
    assert "1.5" in str(caught.value)
    assert [row.error is not None for row in _ours()] == [True, True]


def test_a_name_that_we_offer_too_is_a_conflict_whose_cure_keeps_polyaccel(tmp_path: Path, offer: Offer) -> None:
    offer("jsonl = acme:lines\n")
    with pytest.raises(PluginConflict) as caught:
        find_plugin(GROUP, "jsonl")
    assert caught.value.value == "jsonl"
    assert "1.5" in str(caught.value)


def test_not_found_lists_what_is_installed_and_suggests(offer: Offer) -> None:
    offer(pencil=plugin_class())
    with pytest.raises(PluginNotFound) as caught:
        load("pencill")
    assert caught.value.value == "pencill"
    assert all(part in str(caught.value) for part in ("1.5", "'pencil'"))
    with pytest.raises(PluginNotFound) as caught:
        load("brush")
    assert "did you mean" not in str(caught.value)
    assert "entry-point group 'polyaccel.monitors'" in caught.value.hint
    assert caught.value.value == "brush"


def test_our_built_ins_are_listed_in_every_group() -> None:
    for group in PluginGroup:
        assert "polyaccel" in {info.package for info in list_plugins(group)}, group


def _ours() -> list[Any]:
    rows = probe_all(GROUP, Contract, Contract.API_VERSION)
    return [row for row in rows if row.info.package == "acme"]
