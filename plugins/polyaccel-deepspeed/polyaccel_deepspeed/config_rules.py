"""Values and keys that DeepSpeed's own reader of configs accepts or passes over, and polyaccel refuses.

DeepSpeed 0.19.8 reads some tables key by key, so that it never sees a foreign key there, and others by pydantic, which
converts text to numbers and refuses foreign keys. The rules below follow it table by table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from typing import Annotated, Any

from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from polyaccel.config import Config
from polyaccel.config.keys import json_name, nested_models, suggest_key, walk_keys
from polyaccel.config.load import check_tree
from polyaccel.config.meshes import data_ranks
from polyaccel.config.section import Section
from polyaccel.config.sections.comm import LoggedOp
from polyaccel.config.sections.optimizer import OPTIMIZER_PARAMS
from polyaccel.config.sections.scheduler import SCHEDULER_PARAMS
from polyaccel.config.spellings import respell_mesh
from polyaccel.config.unsupported_keys import absent_keys, is_above
from polyaccel_deepspeed.change import Change, Tree
from polyaccel_deepspeed.refused_keys import REMOVED

_READ_BY_KEY = (
    "",
    "optimizer",
    "scheduler",
    "pipeline",
    "activation_checkpointing",
    "checkpoint",
    "data_types",
    "flops_profiler",
    "aio",
    "autotuning",
    "data_efficiency",
    "torch_autocast",
    "timers",
)
"""Tables that DeepSpeed asks for single keys; "" is the top level."""
_RENAMED = frozenset({"bfloat16"})
"""Top-level keys of older versions that polyaccel still reads."""
_MEANT = {"fp32_allreduce": '"communication_data_type": "fp32"'}
"""What foreign keys of other tools may have meant, where no name resembles it."""
_TYPES = {
    **dict.fromkeys(("fp32", "float32", "float"), "fp32"),
    **dict.fromkeys(("fp16", "float16", "half"), "fp16"),
    **dict.fromkeys(("bf16", "bfloat16"), "bf16"),
}
_LONG = {"fp16": "float16", "bf16": "bfloat16"}


def known_keys() -> frozenset[str]:
    """The dotted names of all keys that polyaccel reads, or refuses as those of an absent feature."""
    return frozenset({*(key.dotted for key in walk_keys(Config)), *absent_keys()})


def _foreign(tree: Tree) -> Iterator[Change]:
    """Drop the keys that DeepSpeed never reads, with one warning for all of them."""
    known, sections = known_keys() | _RENAMED, {key.dotted for key in walk_keys(Config) if key.is_section}
    found = list[tuple[str, ...]]()

    def search(table: Tree, path: tuple[str, ...]) -> None:
        for name in list(table):
            here = (*path, name)
            key = ".".join(here)
            if key in known or key in REMOVED or is_above(key):
                is_table = key in sections or is_above(key)
                if is_table and path and isinstance(table[name], dict):
                    has_own_names = any(one.startswith(f"{key}[].") for one in known)
                    for one in table[name].values() if has_own_names else [table[name]]:
                        if isinstance(one, dict):
                            search(one, (*path, f"{name}[]") if has_own_names else here)
            else:
                found.append(here)
                del table[name]

    for section in _READ_BY_KEY:
        table = tree.get(section) if section else tree
        if isinstance(table, dict):
            search(table, (section,) if section else ())
    if found:
        meant = [_meaning(path) for path in found]
        hints = [f"{'.'.join(path)}: {hint}" for path, hint in zip(found, meant, strict=True) if hint]
        said = "which DeepSpeed passes over: dropped" if len(found) == 1 else "which DeepSpeed passes over: all dropped"
        hint = f" ({'; '.join(hints)})" if hints else ""
        yield Change(", ".join(".".join(path) for path in found), f"{said}{hint}", is_warning=True)


def _meaning(path: tuple[str, ...]) -> str:
    """What a foreign key may have meant; empty where nothing resembles it."""
    if path[-1] in _MEANT:
        return f"did you mean {_MEANT[path[-1]]}?"
    hint = suggest_key(Config, path, absent_keys())
    return hint if hint.startswith("did you mean") else ""


def _text(tree: Tree) -> Iterator[Change]:
    """Read text that stands for a number or a truth value, and numbers of another kind, as pydantic does."""
    yield from _converted(Config, tree, "")
    for section, models in (("optimizer", OPTIMIZER_PARAMS), ("scheduler", SCHEDULER_PARAMS)):
        table = tree.get(section)
        if isinstance(table, Mapping) and isinstance(table.get("params"), dict):
            names = {name.lower(): model for name, model in models.items()}
            model = names.get(str(table.get("type", "")).lower())
            if model is not None:
                yield from _converted(model, table["params"], f"{section}.params.")


def _converted(model: type[Section], table: Tree, above: str) -> Iterator[Change]:
    for name, field in model.model_fields.items():
        key = next((known for known in (json_name(name, field), name) if known in table), None)
        if key is None:
            continue
        value = table[key]
        children = nested_models(field.annotation)
        if isinstance(value, dict):
            for child in children:
                yield from _converted(child, value, f"{above}{key}.")
        elif isinstance(value, str | int | float) and value != "auto" and not children:
            read = _as_pydantic_reads(field, value)
            if read is not None:
                table[key] = read
                yield Change(f"{above}{key}", f"= {value!r} was read as {read!r}")


def _as_pydantic_reads(field: FieldInfo, value: str | float) -> bool | int | float | None:
    """The number or truth value that `value` stands for in a field that does not take it as it is; else None."""
    annotation: Any = field.annotation
    if field.metadata:
        annotation = Annotated[(annotation, *field.metadata)]
    adapter: TypeAdapter[Any] = TypeAdapter(annotation)
    if _takes(adapter, value):
        return None
    if isinstance(value, str) and value.strip().isdecimal() and _takes(adapter, int(value)):
        return int(value)  # of a choice of numbers
    try:
        read = adapter.validate_python(value, strict=False)
    except ValidationError:
        return None
    return read if isinstance(read, bool | int | float) else None


def _takes(adapter: TypeAdapter[Any], value: Any) -> bool:
    """Whether `value` is right as it is."""
    try:
        adapter.validate_python(value, strict=True)
    except ValidationError:
        return False
    return True


def _element_types(tree: Tree) -> Iterator[Change]:
    """Read element types by all names that DeepSpeed has for them, in any case."""
    tables = [(tree, "", "communication_data_type", False)]
    for section, name, is_long in (
        ("data_types", "grad_accum_dtype", False),
        ("data_types", "param_dtype", False),
        ("data_types", "buffer_dtype", False),
        ("torch_autocast", "dtype", True),
    ):
        if isinstance(tree.get(section), dict):
            tables.append((tree[section], f"{section}.", name, is_long))
    for table, above, name, is_long in tables:
        value = table.get(name)
        read = _TYPES.get(value.lower().removeprefix("torch.")) if isinstance(value, str) else None
        if read is not None:
            read = _LONG.get(read, read) if is_long else read
            if read != value:
                table[name] = read
                yield Change(f"{above}{name}", f"= {value!r} was read as {read!r}")


def _reductions(tree: Tree) -> Iterator[Change]:
    """Read the operation on gradients in any case, as DeepSpeed does."""
    key = "gradient_allreduce_op"
    value = tree.get(key)
    if isinstance(value, str) and value != value.lower():
        tree[key] = value.lower()
        yield Change(key, f"= {value!r} was read as {tree[key]!r}")


def _without_effect(tree: Tree) -> Iterator[Change]:
    """Drop settings that have no effect given the others."""
    fp16 = tree.get("fp16")
    is_dynamic = isinstance(fp16, dict) and fp16.get("enabled") and not fp16.get("loss_scale")
    if isinstance(fp16, dict) and fp16.get("min_loss_scale") == 0 and not is_dynamic:
        del fp16["min_loss_scale"]
        yield Change("fp16.min_loss_scale", "= 0 was dropped: a static loss scale has no floor")
    recompute = tree.get("activation_checkpointing")
    key = "contiguous_memory_optimization"
    if isinstance(recompute, dict) and recompute.get(key) is True and recompute.get("number_checkpoints") is None:
        del recompute[key]
        what = "was dropped: without number_checkpoints there is nothing to allocate for"
        yield Change(f"activation_checkpointing.{key}", what)
    if tree.get("prescale_gradients") is True and tree.get("gradient_predivide_factor", 1.0) != 1.0:
        value = tree.pop("gradient_predivide_factor")
        yield Change("gradient_predivide_factor", f"= {value!r} was dropped: prescale_gradients divides by all ranks")
    schedule = tree.get("scheduler")
    params = schedule.get("params") if isinstance(schedule, Mapping) else None
    if isinstance(params, dict) and params.get("last_batch_iteration") == -1:
        del params["last_batch_iteration"]
        yield Change("scheduler.params.last_batch_iteration", "= -1 was dropped: a new schedule begins there")


def _logged_operations(tree: Tree) -> Iterator[Change]:
    """Drop names of operations that no collective here has."""
    table = tree.get("comms_logger")
    if not isinstance(table, dict) or not isinstance(table.get("prof_ops"), list):
        return
    adapter: TypeAdapter[Any] = TypeAdapter(tuple[LoggedOp, ...])
    known = []
    for each in table["prof_ops"]:
        try:
            known += adapter.validate_python((each,))
        except ValidationError:
            yield Change("comms_logger.prof_ops", f"has {each!r}, which is not a collective of this engine: dropped")
    table["prof_ops"] = known
    if not known and table.get("prof_all", True) is False:
        table["enabled"] = False
        yield Change("comms_logger", "was switched off: it selects no operation")


def whole_batch(tree: Tree, world_size: int) -> Iterator[Change]:
    """Drop a global batch size that counts ranks which share samples, as the Trainer of transformers computes it."""
    train, micro, steps = (tree.get(name) for name in _TRIAD)
    spelt = deepcopy(tree)
    respell_mesh(spelt)
    mesh, _ = check_tree({"mesh": spelt.get("mesh", {})}, frozenset(), {}, {})
    ranks = data_ranks(mesh, world_size)
    is_whole = isinstance(train, int) and isinstance(micro, int) and train == micro * (steps or 1) * world_size
    if ranks < world_size and is_whole:
        del tree["train_batch_size"]
        yield Change(
            "train_batch_size",
            f"= {train} was dropped: it counts {world_size} ranks, of which {ranks} have their own samples",
            is_warning=True,
        )


_TRIAD = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")

RULES: tuple[Callable[[Tree], Iterator[Change]], ...] = (
    _text,
    _element_types,
    _reductions,
    _without_effect,
    _logged_operations,
    _foreign,
)
"""In their order: values first, for foreign keys have none that matter."""
