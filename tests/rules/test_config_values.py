"""Parts get values, not JSON keys: only where an engine is composed does anything read the config."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

from polyaccel.config.spellings import MESH_SPELLINGS

ROOT = Path(__file__).parents[2] / "polyaccel"
READERS = (
    "config",  # defines the keys
    "cli",  # shows them
    "planner",  # plans for them, changes them
    "engine/policies",  # makes values of them
    "engine/runtime.py",
    "engine/tiers.py",  # opens those that it names
    "torch/inference.py",
    "torch/initialize.py",
    "torch/rewrites",
    "torch/verify",  # composes plain engines in place of ours
    "jax/initialize.py",
    "jax/native_keys.py",
    "jax/pipeline_stages.py",
    "jax/rewrites.py",
    "jax/verify",
)
PASSES_ON = {  # Entry points of users that take a config too, and check it.
    "__init__.py",
    "frontend.py",
    "engine/base.py",  # keeps it for users, as `engine.config`
    "torch/api/activations.py",
    "torch/compression/distillation.py",
    "torch/compression/models.py",
    "torch/deferred_init/init.py",
}
NO_CONFIG_OF_OURS = {"jax"}
"""Names whose attribute `config` is another library's: `jax.config`."""


@cache
def files(*exempt: str) -> dict[str, ast.Module]:
    """The files that may not read the config, parsed for the test that asks first and not while tests are collected."""
    return {
        name: ast.parse(file.read_text(encoding="utf-8"))
        for file in sorted(ROOT.rglob("*.py"))
        if not (name := file.relative_to(ROOT).as_posix()).startswith(exempt or READERS)
    }


def imports(tree: ast.Module) -> list[str]:
    found = [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module]
    return found + [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]


def test_no_part_imports_a_section() -> None:
    wrong = {
        name: modules
        for name, tree in files().items()
        if (modules := [module for module in imports(tree) if module.startswith("polyaccel.config.sections")])
    }
    assert wrong == {}


def test_only_entry_points_import_the_config() -> None:
    found = {
        name for name, tree in files().items() if any(module.startswith("polyaccel.config") for module in imports(tree))
    }
    assert found - PASSES_ON == set()


def test_no_part_reads_a_key() -> None:
    """`config.zero_optimization`, `self.config.jax`, `runtime.config.optimizer` and their like."""
    wrong = []
    for name, tree in files().items():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Attribute):
                continue
            owner = node.value
            is_config = (isinstance(owner, ast.Name) and owner.id == "config") or (
                isinstance(owner, ast.Attribute)
                and owner.attr == "config"
                and not (isinstance(owner.value, ast.Name) and owner.value.id in NO_CONFIG_OF_OURS)
            )
            if is_config:
                wrong.append(f"{name}:{node.lineno}: {ast.unparse(node)}")
    assert wrong == []


def test_each_exception_is_one() -> None:
    assert [name for name in sorted(PASSES_ON) if "polyaccel.config" not in " ".join(imports(files()[name]))] == []


def is_stages(node: ast.Attribute) -> bool:
    """Whether it is `....pipeline.stages`."""
    return node.attr == "stages" and isinstance(node.value, ast.Attribute) and node.value.attr == "pipeline"


def test_the_engine_reads_the_sizes_of_axes_in_mesh_alone() -> None:
    others = {key.rpartition(".")[2] for keys in MESH_SPELLINGS.values() for key in keys} - {"stages"}
    found = {
        f"{name}:{node.lineno}"
        for name, tree in files("config/").items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and (node.attr in others or is_stages(node))
    }
    assert found == set()
