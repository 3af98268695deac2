"""`deepspeed.utils`, as far as it is not `polyaccel.utils`: the logger, groups of ranks, whole trees of tensors."""

from __future__ import annotations

import json
import logging
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import reduce, wraps
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.utils._pytree import tree_map_only

from polyaccel.errors import PolyaccelError, ShardingError
from polyaccel.torch.api.fragments import unreduced_grad
from polyaccel.torch.sharding import leaf_modules
from polyaccel.utils import safe_get_full_grad as reduced_gradient
from polyaccel.utils import safe_set_full_grad

F = TypeVar("F", bound=Callable[..., Any])

logger = logging.getLogger("DeepSpeed")
"""DeepSpeed's logger, whose level clients set. polyaccel's own lines come from the logger `polyaccel`."""
if not logger.handlers:
    _handler = logging.StreamHandler(sys.stdout)
    _handler.setFormatter(
        logging.Formatter("[%(asctime)s] [%(levelname)s] [%(filename)s:%(lineno)d:%(funcName)s] %(message)s")
    )
    logger.addHandler(_handler)
    logger.propagate = False
    logger.setLevel(logging.WARNING)


def keep_lines_from_root() -> None:
    """Let the root logger's handlers have no lines of polyaccel's, as they have none of DeepSpeed's: clients that have
    configured logging would show each twice, and read ours as their own."""
    logging.getLogger("polyaccel").propagate = False


def log_dist(message: str, ranks: Iterable[int] | None = None, level: int = logging.INFO) -> None:
    """Log `message` on the given ranks; on all with None or -1 among them."""
    wanted = list(ranks or [-1])
    rank = dist.get_rank() if dist.is_initialized() else -1
    if -1 in wanted or rank in wanted:
        logger.log(level, "[Rank %d] %s", rank, message)


def log_dist_once(message: str, ranks: Iterable[int] | None = None, level: int = logging.INFO) -> None:
    """`log_dist`, once for each message."""
    if message not in _logged:
        _logged.add(message)
        log_dist(message, ranks, level)


_logged: set[str] = set()


def print_json_dist(message: Mapping[str, Any], ranks: Iterable[int] | None = None, path: str | None = None) -> None:
    """Write `message` to the file `path` as JSON, on the given ranks."""
    wanted = list(ranks or [-1])
    rank = dist.get_rank() if dist.is_initialized() else -1
    if path is not None and (-1 in wanted or rank in wanted):
        Path(path).write_text(json.dumps({**message, "rank": rank}), encoding="utf-8")


def print_dist(message: str, ranks: Iterable[int] | None = None) -> None:
    """Print `message` on the given ranks, like `log_dist`."""
    wanted = list(ranks or [-1])
    rank = dist.get_rank() if dist.is_initialized() else -1
    if -1 in wanted or rank in wanted:
        print(f"[Rank {rank}] {message}", flush=True)


def set_log_level_from_string(log_level_str: str, custom_logger: logging.Logger | None = None) -> None:
    """Set a logger's level by its name, for example "warning"."""
    (custom_logger or logger).setLevel(get_log_level_from_string(log_level_str))


def get_log_level_from_string(log_level_str: str) -> int:
    """The number of a level's name. Raises PolyaccelError for another word."""
    level = getattr(logging, log_level_str.upper(), None)
    if not isinstance(level, int):
        raise PolyaccelError(f"{log_level_str!r} is not a level", hint='use "debug", "info", "warning" or "error"')
    return level


def get_current_level() -> int:
    """The level of DeepSpeed's logger."""
    return logger.getEffectiveLevel()


def should_log_le(max_log_level_str: str) -> bool:
    """Whether DeepSpeed's logger shows as much as the named level, or more."""
    return get_current_level() <= get_log_level_from_string(max_log_level_str)


def instrument_w_nvtx(func: F) -> F:
    """`func` in a range of the device's profiler, where there is one."""

    @wraps(func)
    def ranged(*args: Any, **named: Any) -> Any:
        from polyaccel_deepspeed.accelerator import get_accelerator

        get_accelerator().range_push(func.__qualname__)
        try:
            return func(*args, **named)
        finally:
            get_accelerator().range_pop()

    return ranged  # type: ignore[return-value]


def clone_tensors_for_torch_save(item: Any, device: Any = torch.device("cpu")) -> Any:  # noqa: B008 - DeepSpeed's default
    """`item` with copies of its tensors on `device`, without the rest of the memory that they are part of.

    Tied tensors stay tied.
    """
    copies: dict[Any, Tensor] = {}

    def copy(tensor: Tensor) -> Tensor:
        place = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype) if tensor.numel() else id(tensor)
        if place not in copies:
            copies[place] = tensor.detach().clone().to(device)
        return copies[place]

    return tree_map_only(Tensor, copy, item)


def memory_status(msg: str, print_rank: int = -1, reset_max: bool = False) -> None:
    """Print what the device of each rank holds, in GiB; `print_rank` is the only rank that prints, if it is not -1."""
    from polyaccel_deepspeed.accelerator import get_accelerator

    rank = dist.get_rank() if dist.is_initialized() else 0
    if print_rank not in (-1, rank):
        return
    device = get_accelerator()
    device.synchronize()
    if reset_max:
        device.reset_peak_memory_stats()
    names = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")
    held, most, cached, most_cached = (getattr(device, name)() / 2**30 for name in names)
    print(
        f"RANK={rank} MEMSTATS {msg} device={device.current_device_name()} current alloc={held:.4f}GB "
        f"(max={most:.4f}GB) current cache={cached:.4f}GB (max={most_cached:.4f}GB)"
    )


def move_to_device(item: Any, device: Any, criterion_func: Callable[[Any], bool] | None = None) -> Any:
    """`item` with its tensors on `device`: all, or those that `criterion_func` wants."""

    def move(tensor: Tensor) -> Tensor:
        return tensor.to(device) if criterion_func is None or criterion_func(tensor) else tensor

    return tree_map_only(Tensor, move, item)


def set_random_seed(seed: int) -> None:
    """Seed Python, numpy and torch."""
    import numpy

    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)


def call_to_str(base: str, *args: Any, **kwargs: Any) -> str:
    """A call as one writes it: `base(1, two='2')`."""
    return f"{base}({', '.join([*map(repr, args), *(f'{name}={value!r}' for name, value in kwargs.items())])})"


def ensure_directory_exists(filename: str) -> None:
    """Make the folder of a file."""
    Path(filename).parent.mkdir(parents=True, exist_ok=True)


def safe_get_full_grad(param: nn.Parameter) -> Tensor | None:
    """The whole gradient; before its reduction, as in `no_sync`, the sum of this rank alone. Collective."""
    whole = reduced_gradient(param)
    if whole is None:
        whole = unreduced_grad(param)
    return param.grad if whole is None else whole


def safe_update_full_grad_vectorized(
    param_list: Iterable[nn.Parameter], update_func: Callable[[Tensor, nn.Parameter], Any]
) -> None:
    """Replace the whole gradient of each parameter that has one by `update_func(gradient, parameter)`. Collective."""
    for parameter in param_list:
        gradient = safe_get_full_grad(parameter)
        if gradient is not None:
            safe_set_full_grad(parameter, update_func(gradient, parameter))


def recursive_getattr(model: nn.Module, module_name: str) -> Any:
    """Return the attribute of `model` with a dotted name."""
    return reduce(getattr, module_name.split("."), model)


def recursive_setattr(model: nn.Module, module_name: str, module: Any) -> None:
    """Set the attribute of `model` with a dotted name."""
    above, _, last = module_name.rpartition(".")
    setattr(recursive_getattr(model, above) if above else model, last, module)


class OnDevice:
    """A context in which modules are built on `device`, their floating-point tensors as `dtype`."""

    def __init__(self, dtype: torch.dtype, device: Any = "meta", enabled: bool = True) -> None:
        self._dtype, self._device, self._enabled = dtype, device, enabled
        self._context: Any = None

    def __enter__(self) -> None:
        if self._enabled:
            self._context = _building(self._dtype, self._device)
            self._context.__enter__()

    def __exit__(self, *error: Any) -> None:
        if self._context is not None:
            self._context.__exit__(*error)


@contextmanager
def _building(dtype: torch.dtype, device: Any) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: Iterable[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Gather the named modules as one each; without `flag`, no longer. Return them, and the names that no module has.

    Raises NoModuleError for such a name, unless `raise_if_not_found` is off.
    """
    return _mark_leaves(model, module_names, str.__eq__, flag, raise_if_not_found)


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, module_name_suffixes: Iterable[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """`set_z3_leaf_modules_by_name` for the ends of full names."""
    return _mark_leaves(model, module_name_suffixes, str.endswith, flag, raise_if_not_found)


class NoModuleError(ShardingError, ValueError):
    """No module has a name. DeepSpeed raises a ValueError."""


def _mark_leaves(
    model: nn.Module, wanted: Iterable[str], is_meant: Callable[[str, str], bool], flag: bool, raise_if_not_found: bool
) -> tuple[list[nn.Module], list[str]]:
    modules, missing = dict[nn.Module, None](), list[str]()
    for one in wanted:
        found = [module for name, module in model.named_modules() if is_meant(name, one)]
        modules.update(dict.fromkeys(found))
        if not found:
            missing.append(one)
    for module in modules:
        leaf_modules.set_z3_leaf_module(module, flag)
    if missing and raise_if_not_found:
        hint = "give names as model.named_modules() has them"
        raise NoModuleError(f"no module is named {', '.join(missing)}", hint=hint, value=missing)
    return [*modules], missing
