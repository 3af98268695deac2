"""Names of a DeepSpeed's modules and attributes of its classes, read from its source without importing it.

`python docs/generate/deepspeed_names.py FOLDER FACTS` renews FACTS, `tests/unit/dropin/deepspeed_facts.json`, by the
folder `deepspeed` of a source archive or an installation: all but the names of facades and the members of classes.
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

from deepspeed_source import Function, Source, config_keys, launcher_options, public_modules

ENGINE = ("deepspeed.runtime.engine", "DeepSpeedEngine")
HOMES = (
    "deepspeed.accelerator.cpu_accelerator",
    "deepspeed.accelerator.cuda_accelerator",
    "deepspeed.accelerator.hpu_accelerator",
    "deepspeed.accelerator.klxpu_accelerator",
    "deepspeed.accelerator.mlu_accelerator",
    "deepspeed.accelerator.mps_accelerator",
    "deepspeed.accelerator.npu_accelerator",
    "deepspeed.accelerator.sdaa_accelerator",
    "deepspeed.accelerator.supa_accelerator",
    "deepspeed.accelerator.xpu_accelerator",
    "deepspeed.checkpoint.deepspeed_checkpoint",
    "deepspeed.checkpoint.ds_to_universal",
    "deepspeed.env_report",
    "deepspeed.launcher.launch",
    "deepspeed.module_inject.layers",
    "deepspeed.moe.mappings",
    "deepspeed.monitor.comet",
    "deepspeed.monitor.config",
    "deepspeed.monitor.csv_monitor",
    "deepspeed.monitor.tensorboard",
    "deepspeed.monitor.wandb",
    "deepspeed.runtime.comm.coalesced_collectives",
    "deepspeed.runtime.fp16.loss_scaler",
    "deepspeed.runtime.rollout",
    "deepspeed.runtime.rollout.base",
    "deepspeed.runtime.rollout.hybrid_engine_rollout",
    "deepspeed.runtime.rollout.opsd",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "deepspeed.utils.numa",
    "deepspeed.utils.timer",
    "deepspeed.utils.torch",
)
"""Modules of which scripts import names, in addition to those that `deepspeed_facts.py` imports."""
CONSTANTS = (
    "deepspeed.checkpoint.constants",
    "deepspeed.runtime.config",
    "deepspeed.runtime.constants",
    "deepspeed.runtime.lr_schedules",
)
"""Modules of constants, mostly names of config keys."""


def facts_of(folder: Path) -> dict[str, Any]:
    """Return all that is read from source, as JSON has it."""
    source = Source(folder)
    return {
        "read_on": date.today().isoformat(),
        "keys": config_keys(source),
        "options": launcher_options(source),
        "scripts": scripts_of(folder),
        "every_module": public_modules(folder),
        "engine_attributes": attributes_of(source, *ENGINE),
        "constants": {name: constants_of(source, name) for name in CONSTANTS},
        "source_modules": {name: names_of(source, name) for name in HOMES if name in source.modules},
    }


def names_of(source: Source, module: str) -> dict[str, str]:
    """Return the public functions and classes that a module defines, with their arguments as `a b=1 *rest`."""
    found = {}
    for node in source.modules[module].body:
        if isinstance(node, (Function, ast.ClassDef)) and not node.name.startswith("_"):
            found[node.name] = _arguments(node) if isinstance(node, Function) else _constructor(source, node)
    return dict(sorted(found.items()))


def attributes_of(source: Source, module: str, name: str) -> list[str]:
    """Return the public attributes that the methods of a class set."""
    (node,) = (one for one in source.modules[module].body if isinstance(one, ast.ClassDef) and one.name == name)
    assigned = (one for one in ast.walk(node) if isinstance(one, ast.Attribute) and isinstance(one.ctx, ast.Store))
    own = (one.attr for one in assigned if isinstance(one.value, ast.Name) and one.value.id == "self")
    return sorted({one for one in own if not one.startswith("_")})


def constants_of(source: Source, module: str) -> dict[str, Any]:
    """Return the constants of a module that are one word, number or truth value, or None."""
    found = {}
    for node in source.modules[module].body:
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Name)
            and isinstance(node.value, ast.Constant)
        ):
            found[node.targets[0].id] = node.value.value
    found = {name: value for name, value in found.items() if not name.startswith("_")}
    return {name: value for name, value in found.items() if not isinstance(value, str) or "\n" not in value}


def scripts_of(folder: Path) -> list[str]:
    """Return the commands that an installation has, from a source archive around `folder`."""
    return sorted(path.name for path in (folder.parent / "bin").glob("*") if path.is_file())


def _constructor(source: Source, node: ast.ClassDef) -> str:
    for one in node.body:
        if isinstance(one, Function) and one.name == "__init__":
            return _arguments(one).partition(" ")[2]
    bases = (base.id for base in node.bases if isinstance(base, ast.Name) and base.id in source.classes)
    return next((found for base in bases if (found := _constructor(source, source.classes[base][1]))), "")


def _arguments(node: Function) -> str:
    return " ".join(_parts(node.args))


def _parts(found: ast.arguments) -> Iterator[str]:
    plain = [*found.posonlyargs, *found.args]
    defaults: list[ast.expr | None] = [None] * (len(plain) - len(found.defaults)) + list(found.defaults)
    for one, default in zip(plain, defaults, strict=True):
        yield one.arg if default is None else f"{one.arg}={_value(default)}"
    if found.vararg is not None:
        yield f"*{found.vararg.arg}"
    for one, keyword in zip(found.kwonlyargs, found.kw_defaults, strict=True):
        yield one.arg if keyword is None else f"{one.arg}={_value(keyword)}"
    if found.kwarg is not None:
        yield f"**{found.kwarg.arg}"


def _value(node: ast.expr) -> str:
    try:
        value = ast.literal_eval(node)
    except ValueError:
        return "..."
    return repr(value).replace(" ", "") if value is None or type(value) in (bool, int, float, str) else "..."


if __name__ == "__main__":
    facts = Path(sys.argv[2])
    known = json.loads(facts.read_text(encoding="utf-8"))
    facts.write_text(json.dumps(known | facts_of(Path(sys.argv[1])), indent=1) + "\n", encoding="utf-8")
