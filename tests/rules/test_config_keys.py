"""The keys of the config are our users' surface: each is documented, and the list changes only on purpose."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from polyaccel.config import Config
from polyaccel.config.auto import RULES
from polyaccel.config.keys import walk_keys
from polyaccel.config.optimizer import OPTIMIZER_PARAMS
from polyaccel.config.scheduler import SCHEDULER_PARAMS
from polyaccel.config.section import Section
from polyaccel.config.unsupported import GAPS

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
        gap = next((gap for gap in GAPS if _covers(gap.key, key.dotted)), None)
        missing = "" if gap is None else "  (only this value)" if gap.asks is None else "  (not every value)"
        lines.append(f"{key.dotted} = {value}{auto}{missing}")
    return lines


def _covers(gap: str, key: str) -> bool:
    return key == gap or key.startswith((f"{gap}.", f"{gap}["))


def current_keys() -> str:
    """Every key with its default, whether it may be "auto", and whether other values are errors still."""
    lines = [*_lines(Config), *(line for name, model in NAMED.items() for line in _lines(model, f"{name}."))]
    return "\n".join(lines) + "\n"


def test_the_keys_are_the_frozen_ones() -> None:
    """To change them on purpose: `python tests/rules/test_config_keys.py`, and review the difference."""
    assert current_keys() == GOLDEN.read_text()


def test_every_key_and_section_is_documented() -> None:
    models: list[type[Section]] = [Config, *NAMED.values()]
    keys = [key for model in models for key in walk_keys(model)]
    assert [key.dotted for key in keys if not (key.field.description or "").strip()] == []
    assert [key.model.__name__ for key in keys if not (key.model.__doc__ or "").strip()] == []


def test_every_gap_and_every_auto_rule_names_a_key() -> None:
    known = {key.dotted for key in walk_keys(Config)}
    known |= {f"optimizer.params.{name}" for model in OPTIMIZER_PARAMS.values() for name in model.model_fields}
    known |= {f"scheduler.params.{name}" for model in SCHEDULER_PARAMS.values() for name in model.model_fields}
    assert [gap.key for gap in GAPS if gap.key not in known] == []
    assert [key for key in RULES if key not in known] == []
    assert len({gap.key for gap in GAPS}) == len(GAPS)


def test_the_config_needs_no_array_framework() -> None:
    code = "import sys, polyaccel.config, polyaccel.cli.config; print({'torch', 'jax', 'numpy'} & set(sys.modules))"
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True, env=environment
    )
    assert done.stdout.strip() == "set()"


if __name__ == "__main__":
    GOLDEN.write_text(current_keys())
