"""The shape of a torch model for the planner: built on the meta device, so that it costs no memory.

The model comes from a function of the user's (`module:function`) or from a Hugging Face config directory.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

from polyaccel.engine.policies.modules import ModuleRules
from polyaccel.errors import PolyaccelError
from polyaccel.planner.model import ModelShape
from polyaccel.torch.sharding.leaf_modules import mark_configured_leaves
from polyaccel.torch.sharding.specs import convert_buffers, in_gradient_order, parameter_specs
from polyaccel.torch.sharding.units import find_units, units_of_parameters

Change = Callable[[nn.Module], None]
"""What happens to a model before it is looked at: ranks may share it."""


def _as_it_is(model: nn.Module) -> None:
    """Every rank has all of it."""


def shape_of_function(path: str, rules: ModuleRules, change: Change = _as_it_is) -> ModelShape:
    """Return the shape of `module:function`'s model on the meta device, after `change`."""
    with torch.device("meta"):
        model = model_of_function(path, "on the meta device")
    return shape_of_module(model, f"{path}()", rules, change)


def model_of_function(path: str, where: str) -> nn.Module:
    """Return the model that `module:function` makes; `where` names the tensors in errors."""
    build = _function(path)
    try:
        model = build()
    except Exception as error:
        raise PolyaccelError(
            f"{path}() failed {where}: {type(error).__name__}: {error}",
            hint="it is called without arguments and must not compute with values",
            value=path,
        ) from error
    if not isinstance(model, nn.Module):
        kind = type(model).__name__
        raise PolyaccelError(f"{path}() returned a {kind}", hint="return a torch.nn.Module", value=kind)
    return model


def shape_of_directory(directory: Path, rules: ModuleRules, change: Change = _as_it_is) -> ModelShape:
    """The shape of `model_of_directory`, after `change`, with its errors."""
    with torch.device("meta"):
        model = model_of_directory(directory)
    return shape_of_module(model, f"{type(model).__name__} of {directory}", rules, change)


def model_of_directory(directory: Path) -> nn.Module:
    """Return the model of `config.json` in `directory`: the class named there, else the bare model."""
    try:
        import transformers
    except ImportError as error:
        raise PolyaccelError(
            f"{directory} is a directory, and reading a Hugging Face config needs transformers: {error}",
            hint="pip install transformers, or pass module:function or a number of parameters",
            value=str(directory),
        ) from error
    try:
        described = transformers.AutoConfig.from_pretrained(str(directory), local_files_only=True)
        architecture = _architecture(directory)
        if architecture is not None and isinstance(kind := getattr(transformers, architecture, None), type):
            return kind(described)  # type: ignore[no-any-return]
        return transformers.AutoModel.from_config(described)  # type: ignore[no-untyped-call, no-any-return]
    except Exception as error:
        raise PolyaccelError(
            f"transformers makes no model of {directory}: {type(error).__name__}: {error}",
            hint="pass a directory with the config.json of a model",
            value=str(directory),
        ) from error


def shape_of_module(model: nn.Module, summary: str, rules: ModuleRules, change: Change = _as_it_is) -> ModelShape:
    """Return a model's shape, after `change`, with all parameters trained under `rules`."""
    change(model)
    convert_buffers(model, rules.buffer_dtype, rules.keep_in_fp32)
    mark_configured_leaves(model, rules.leaves)
    specs = parameter_specs(
        model, [list(model.parameters())], rules.param_dtype, sparse_gradients=rules.sparse_gradients
    )
    units = units_of_parameters(model, find_units(model))
    buffer_nbytes = sum(buffer.numel() * buffer.element_size() for buffer in model.buffers())
    return ModelShape(summary, in_gradient_order(specs), units, buffer_nbytes)


def _architecture(directory: Path) -> str | None:
    named = json.loads((directory / "config.json").read_text(encoding="utf-8")).get("architectures") or [None]
    return named[0] if isinstance(named[0], str) else None


def _function(path: str) -> Callable[[], Any]:
    name, _, attribute = path.partition(":")
    with _working_directory_first():
        try:
            function = getattr(import_module(name), attribute)
        except (ImportError, AttributeError) as error:
            raise PolyaccelError(
                f"{path} cannot be imported: {error}", hint="write module:function, as seen from here", value=path
            ) from error
    if not callable(function):
        raise PolyaccelError(f"{path} is a {type(function).__name__}", hint="name a function", value=path)
    return function  # type: ignore[no-any-return]


@contextmanager
def _working_directory_first() -> Iterator[None]:
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        yield
    finally:
        sys.path.remove(here)
