"""The keys of the config are our users' surface: each is documented, and the list changes only on purpose."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from polyaccel_deepspeed.refused_keys import REFUSED_OPTIMIZERS, REMOVED

from polyaccel.config import Config, json_schema
from polyaccel.config.auto import RULES
from polyaccel.config.keys import walk_keys
from polyaccel.config.section import Section
from polyaccel.config.sections.optimizer import OPTIMIZER_PARAMS
from polyaccel.config.sections.scheduler import SCHEDULER_PARAMS
from polyaccel.config.unsupported_keys import ABSENT, BELOW

GOLDEN = Path(__file__).parents[1] / "golden" / "config_keys.txt"
NAMED: dict[str, type[Section]] = {f"optimizer[{name}]": model for name, model in OPTIMIZER_PARAMS.items()} | {
    f"scheduler[{name}]": model for name, model in SCHEDULER_PARAMS.items()
}


def _lines(model: type[Section], prefix: str = "") -> list[str]:
    lines = []
    for key in walk_keys(model, prefix):
        default = key.field.get_default(call_default_factory=True)
        if isinstance(default, Section):
            continue
        value = "required" if key.field.is_required() else json.dumps(default)
        auto = ' | "auto"' if key.dotted in RULES else ""
        lines.append(f"{key.dotted} = {value}{auto}")
    return lines


def current_keys() -> str:
    """Every key that exists, with its default and whether it may be "auto"."""
    lines = [*_lines(Config), *(line for name, model in NAMED.items() for line in _lines(model, f"{name}."))]
    return "\n".join(lines) + "\n"


def test_no_key_exists_that_is_absent_or_removed_by_name() -> None:
    """`tests/unit/dropin/test_dropin_facts.py` holds that every key of DeepSpeed has an answer."""
    exist = {key.dotted for key in walk_keys(Config)}
    patterns = {pattern for entry in ABSENT for pattern in entry.keys} | {f"{key}{BELOW}" for key in REMOVED}
    tables = tuple(pattern.removesuffix("**") for pattern in patterns if pattern.endswith(BELOW))
    assert [key for key in exist if key in patterns or key.startswith(tables)] == []
    assert [key for key in patterns if key.removesuffix(BELOW) in exist] == []


def test_the_schema_offers_no_absent_key() -> None:
    schema = json.dumps(json_schema())
    own = {pattern.removesuffix(BELOW).rpartition(".")[2] for entry in ABSENT for pattern in entry.keys}
    shared = {name for key in walk_keys(Config) for name in key.dotted.split(".")} | {"reduce_scatter"}  # an operation
    assert [name for name in sorted(own - shared) if f'"{name}"' in schema] == []


def test_the_keys_are_the_frozen_ones() -> None:
    """To change them on purpose: `python tests/rules/test_config_keys.py`, and review the difference."""
    assert current_keys() == GOLDEN.read_text()


def test_every_key_and_section_is_documented() -> None:
    models: list[type[Section]] = [Config, *NAMED.values()]
    keys = [key for model in models for key in walk_keys(model)]
    assert [key.dotted for key in keys if not (key.field.description or "").strip()] == []
    assert [key.model.__name__ for key in keys if not (key.model.__doc__ or "").strip()] == []


def test_every_auto_rule_names_a_key_and_no_absent_optimizer_exists() -> None:
    known = {key.dotted for key in walk_keys(Config)}
    known |= {f"optimizer.params.{name}" for model in OPTIMIZER_PARAMS.values() for name in model.model_fields}
    known |= {f"scheduler.params.{name}" for model in SCHEDULER_PARAMS.values() for name in model.model_fields}
    assert [key for key in RULES if key not in known] == []
    assert not set(REFUSED_OPTIMIZERS) & {name.lower() for name in OPTIMIZER_PARAMS}


def test_the_config_needs_no_array_framework() -> None:
    code = "import sys, polyaccel.config, polyaccel.cli.config; print({'torch', 'jax', 'numpy'} & set(sys.modules))"
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=280, check=True, env=environment
    )
    assert done.stdout.strip() == "set()"


if __name__ == "__main__":
    GOLDEN.write_text(current_keys())
