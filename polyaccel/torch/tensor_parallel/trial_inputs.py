"""What modules are called with and which weights they read, recorded in a pass of a copy of the model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from inspect import Parameter, signature, unwrap
from logging import getLogger
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from polyaccel.torch.random_copy import random_copy

_ROWS, _TOKENS = 2, 6
_WITHOUT_VALUES = (Tensor.dtype.__get__, Tensor.device.__get__)  # type: ignore[attr-defined]
"""What a module may read of another's weight: a part of it has the same."""
_LARGE = 1 << 20
_log = getLogger(__name__)


@dataclass(frozen=True)
class Call:
    """The arguments of one call of a module. Tensors that are not `drawn` keep their values, as masks do."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    drawn: frozenset[int]
    """Which of the tensors, counted in order, get random values and have gradients."""

    def drawn_shapes(self) -> list[tuple[int, ...]]:
        """Return the shapes of the drawn tensors; the first has a block's features."""
        tensors = enumerate(_tensors((self.args, self.kwargs)))
        return [tuple(one.shape) for place, one in tensors if place in self.drawn]

    def made(
        self, *, narrowed: tuple[int, int], dtype: torch.dtype, own: Callable[[Tensor], Tensor]
    ) -> tuple[Any, Any, list[Tensor]]:
        """Return arguments with drawn tensors, cut by `narrowed` and `own`."""
        generator, place, drawn = torch.Generator().manual_seed(5), iter(range(1 << 20)), list[Tensor]()

        def one(tensor: Tensor) -> Tensor:
            shape = list(tensor.shape)
            is_drawn = next(place) in self.drawn
            if shape and shape[-1] == narrowed[0]:
                shape[-1] = narrowed[1]
            if is_drawn:
                drawn.append(own(torch.randn(shape, generator=generator)).to(dtype).requires_grad_())
                return drawn[-1]
            kept = tensor[..., : shape[-1]].clone() if shape else tensor.clone()
            return kept.to(dtype) if kept.is_floating_point() else kept

        args, kwargs = mapped((self.args, dict(self.kwargs)), one)
        return args, kwargs, drawn


class _EndOfTrial(Exception):
    """All calls are recorded."""


def recorded_calls(model: nn.Module, names: Sequence[str], widths: Mapping[str, int]) -> dict[str, Call]:
    """Record modules' first calls in a pass of a copy; unreached ones get a tensor of `widths` features."""
    found: dict[str, Call] = {}
    for args, kwargs in _inputs(model, max(widths.values(), default=1)):
        if len(found) == len(names):
            break
        try:
            own = random_copy(model, thin=sum(parameter.numel() for parameter in model.parameters()) > _LARGE)
            _run_recorded(own, [each for each in names if each not in found], found, args, kwargs)
        except Exception as error:
            _log.debug("a trial of %s failed: %s: %s", type(model).__name__, type(error).__name__, error)
    modules = dict(model.named_modules())
    for name in names:
        if name not in found and _takes_one(modules[name]):
            found[name] = Call((torch.empty(_ROWS, _TOKENS, widths[name]),), {}, frozenset([0]))
    return found


class _WatchedWeight(nn.Parameter):
    """A weight whose uses are noted."""

    note: Callable[[], None] | None = None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            for tensor in _tensors((args, kwargs or {})):
                if isinstance(tensor, cls) and tensor.note is not None and func not in _WITHOUT_VALUES:
                    tensor.note()
            return func(*args, **(kwargs or {}))


def weights_read_by_others(model: nn.Module, names: Collection[str]) -> dict[str, str]:
    """Find modules whose weight another module's forward reads, with that one's name, in a pass of a copy.

    Empty where no class of the model mentions a weight of another module, or no copy can be called. A pass cannot
    show all that a forward does which a script has put there, such as TRL's: `names` are its readings if it mentions
    weights.
    """
    found: dict[str, str] = {}
    for name, module in model.named_modules():
        if any(_reads_weights(code) for code in _codes_put_into(module)):
            return dict.fromkeys(names, f"a forward that a script gave {name or type(module).__name__}")
    if not any(map(_mentions_weights, {type(one) for one in model.modules()})):
        return found
    for args, kwargs in _inputs(model, 8):
        found.clear()
        try:
            own = random_copy(model, thin=sum(one.numel() for one in model.parameters()) > _LARGE)
            _watch(own, names, found)
            with torch.no_grad():
                own(*args, **kwargs)
        except Exception as error:
            _log.debug("a trial of %s failed: %s: %s", type(model).__name__, type(error).__name__, error)
            continue
        return found
    return {}


def _mentions_weights(kind: type[nn.Module]) -> bool:
    """Whether a class reads an attribute `weight` of what is not a layer itself."""
    if issubclass(kind, (nn.Linear, nn.Embedding)) or kind.__module__.startswith("torch."):
        return False
    codes = [code for one in vars(kind).values() if (code := getattr(unwrap(one), "__code__", None)) is not None]
    return any(_reads_weights(code) and "init" not in code.co_name for code in codes)


def _reads_weights(code: CodeType) -> bool:
    return "weight" in code.co_names


def _codes_put_into(module: nn.Module) -> Iterator[CodeType]:
    """Code of a forward that another file gave a module without a weight, or its class, and of what that wraps."""
    if "weight" in module._parameters:
        return
    files = () if "forward" in vars(module) else {kind.__module__ for kind in type(module).__mro__}
    step: Any = module.forward
    while step is not None:
        function = getattr(step, "__func__", step)
        if isinstance(function, FunctionType) and function.__globals__.get("__name__") not in files:
            yield function.__code__
        # `unwrap` would pass over a function that has the name and signature of the one that it replaces.
        step = getattr(function, "__wrapped__", None) or getattr(function, "func", None)


def _watch(model: nn.Module, names: Collection[str], found: dict[str, str]) -> None:
    """Note in `found` which of `names` have a weight that others read."""
    running: list[str] = []
    modules = dict(model.named_modules())
    for name, module in modules.items():
        module.register_forward_pre_hook(lambda *_, name=name: running.append(name))
        module.register_forward_hook(lambda *_: running.pop() and None)
    for name in names:
        weight = modules[name].weight
        assert isinstance(weight, nn.Parameter)
        if not isinstance(weight, _WatchedWeight):
            watched = _WatchedWeight(weight.detach())
            watched.note = partial(_note, running, names, name, found)
            for module in modules.values():
                for own, one in module._parameters.items():
                    if one is weight:
                        module._parameters[own] = watched


def _note(running: Sequence[str], owners: Collection[str], name: str, found: dict[str, str]) -> None:
    if running and running[-1] not in owners:
        found.setdefault(name, running[-1])


def _run_recorded(
    model: nn.Module, names: Sequence[str], found: dict[str, Call], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    left = set(names)

    def record(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if name in left:
                left.discard(name)
                found[name] = _call(args, kwargs)
                if not left:
                    raise _EndOfTrial

        return hook

    for module in model.modules():
        theirs: Any = getattr(module, "config", None)
        if getattr(theirs, "use_cache", False):
            theirs.use_cache = False
    modules = dict(model.named_modules())
    for name in names:
        modules[name].register_forward_pre_hook(record(name), with_kwargs=True)
    try:
        with torch.enable_grad():
            model(*args, **kwargs)
    except _EndOfTrial:
        return


def _call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    tensors = list(_tensors((args, kwargs)))
    drawn = {place for place, one in enumerate(tensors) if one.requires_grad}
    floats = [place for place, one in enumerate(tensors) if one.is_floating_point()]
    if not drawn and floats:
        drawn = {floats[0]}
    own_args, own_kwargs = mapped((args, kwargs), lambda one: one.detach().clone())
    return Call(own_args, own_kwargs, frozenset(drawn))


def _inputs(model: nn.Module, width: int) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Arguments that a model may take: its own trial inputs, words, vectors, images."""
    config = getattr(model, "config", None)
    generator = torch.Generator().manual_seed(6)
    largest = next((module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)), 8)
    ids = torch.randint(largest // 2, max(largest, 2), (_ROWS, _TOKENS), generator=generator)
    main = getattr(model, "main_input_name", None)
    if main is not None and config is not None:
        if main == "pixel_values":
            size, channels = getattr(config, "image_size", 32), getattr(config, "num_channels", 3)
            if isinstance(size, int):
                yield (), {main: torch.randn(_ROWS, channels, size, size, generator=generator)}
        if getattr(config, "is_encoder_decoder", False):
            yield (), {main: ids, "decoder_input_ids": ids}
        yield (), {"input_ids": ids}
        return
    if _takes_one(model):
        yield (ids,), {}
        yield (torch.randn(_ROWS, _TOKENS, width, generator=generator),), {}


def _takes_one(module: nn.Module) -> bool:
    """Whether a module can be called with a single tensor."""
    needed = [
        parameter
        for parameter in signature(module.forward).parameters.values()
        if parameter.default is Parameter.empty
        and parameter.kind in (Parameter.POSITIONAL_OR_KEYWORD, Parameter.POSITIONAL_ONLY)
    ]
    return len(needed) <= 1


def mapped(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Return `value` with `function` of each tensor in its tuples, lists and dicts."""
    if isinstance(value, Tensor):
        return function(value)
    if type(value) in (tuple, list):
        return type(value)(mapped(one, function) for one in value)
    if type(value) is dict:
        return {name: mapped(one, function) for name, one in value.items()}
    return value


def _tensors(value: Any) -> Iterator[Tensor]:
    found: list[Tensor] = []
    mapped(value, lambda one: found.append(one) or one)  # type: ignore[func-returns-value]
    return iter(found)
