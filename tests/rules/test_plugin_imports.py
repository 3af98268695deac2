"""Plugins import contract modules only: those of the table in docs/reference/contracts.md.

That holds for the distributions in plugins/, their tests included, and for what `polyaccel plugins new` writes.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from polyaccel import __version__
from polyaccel.cli.plugins.new import FRAMEWORKS, KINDS, write
from polyaccel.testkit.suites import BASES

ROOT = Path(__file__).parents[2]
PLUGINS = ROOT / "plugins"
_ROW = re.compile(r"^\| `(polyaccel[\w.]*)` \| (.+) \| (.+) \|$", re.MULTILINE)
CONTRACT_MODULES = frozenset(
    match[1] for match in _ROW.finditer((ROOT / "docs" / "reference" / "contracts.md").read_text(encoding="utf-8"))
)
EXCEPTIONS = {
    "polyaccel-simdev/tests/test_without_plugin.py": {"polyaccel.accelerators.torch_generic"},
}
"""Files that test polyaccel itself and not their plugin: the accelerator of a device that no plugin is for."""
FRONT_ENDS = ("polyaccel-deepspeed", "polyaccel-verl", "polyaccel-trainers")
"""Distributions that offer polyaccel under other names: no plugins, they need all of it, in their very version."""

FILES = [
    name
    for name in sorted(file.relative_to(PLUGINS).as_posix() for file in PLUGINS.rglob("*.py"))
    if not name.startswith(FRONT_ENDS)
]


def imported_modules(source: str) -> Iterator[str]:
    """The modules of polyaccel that Python code imports, those under `TYPE_CHECKING` and inside functions included."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.partition(".")[0] == "polyaccel")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "polyaccel":
            for alias in node.names:
                yield f"{node.module}.{alias.name}" if _is_module(f"{node.module}.{alias.name}") else str(node.module)


def _is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


def test_the_scan_sees_every_form_of_import() -> None:
    source = """
import polyaccel, numpy
import polyaccel.zero.engine
from polyaccel.accelerators import npu, get_accelerator
if TYPE_CHECKING:
    from polyaccel.core.buffer import Buffer
def later():
    from polyaccel.comm import base as comm_base
"""
    assert sorted(imported_modules(source)) == [
        "polyaccel",
        "polyaccel.accelerators",
        "polyaccel.accelerators.npu",
        "polyaccel.comm.base",
        "polyaccel.core.buffer",
        "polyaccel.zero.engine",
    ]


def test_every_contract_module_is_there() -> None:
    assert len(CONTRACT_MODULES) > 20
    assert [name for name in sorted(CONTRACT_MODULES) if find_spec(name) is None] == []


@pytest.mark.parametrize("file", FILES)
def test_a_plugin_imports_contract_modules_only(file: str) -> None:
    found = set(imported_modules((PLUGINS / file).read_text(encoding="utf-8")))
    assert sorted(found - CONTRACT_MODULES) == sorted(EXCEPTIONS.get(file, ()))


@pytest.mark.parametrize("name", FRONT_ENDS)
def test_a_front_end_needs_this_version_of_polyaccel(name: str) -> None:
    assert f'"polyaccel[torch]=={__version__}"' in (PLUGINS / name / "pyproject.toml").read_text(encoding="utf-8")


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_new_plugin_imports_contract_modules_only(kind: str, framework: str, tmp_path: Path) -> None:
    files = write("acme", [kind], tmp_path / "acme", framework=framework)
    written = [file for file in files if file.suffix == ".py"]
    found = {module for file in written for module in imported_modules(file.read_text(encoding="utf-8"))}
    assert found
    assert sorted(found - CONTRACT_MODULES) == []


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_new_plugin_states_the_version_of_its_contract(kind: str, framework: str, tmp_path: Path) -> None:
    files = write("acme", [kind], tmp_path / "acme", framework=framework)
    (source,) = (file.read_text(encoding="utf-8") for file in files if file.name == f"{kind}.py")
    assert f"API_VERSION: ClassVar[tuple[int, int]] = {BASES[KINDS[kind][0]].API_VERSION}" in source
