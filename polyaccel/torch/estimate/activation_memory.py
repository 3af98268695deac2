"""What activations will take, before there is a model: a training pass on tensors without values, each of which is
followed from the operation that makes it to its end.

The pass is torch's own, so what autograd keeps, what blocks compute again and what lives for a moment in backward is
all there, except for the inside of a kernel. Kernels are chosen as for the CPU. Gradients of parameters are dropped
when they are whole, as the engine takes them into its buckets; parameters and buffers do not count.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from polyaccel.accelerators.memory.torch import torch_dtype
from polyaccel.engine.policies.modules import ModuleRules, RecomputePolicy
from polyaccel.errors import PolyaccelError
from polyaccel.planner.model import ActivationNeeds
from polyaccel.torch.activation_checkpointing.blocks import RecomputedBlocks
from polyaccel.torch.activation_checkpointing.regions import RecomputedRegions
from polyaccel.torch.sharding.specs import convert_buffers, parameter_specs

Prepare = Callable[[nn.Module], None]
"""What happens to a model before it runs: it may compute in tiles."""


class LiveMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of memory that operations inside make and that is still there; `peak_nbytes` is the most so far.
    Memory of `ignored` does not count."""

    def __init__(self, ignored: Collection[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.nbytes = self.peak_nbytes = 0
        self._ignored = {storage._cdata: storage for storage in (tensor.untyped_storage() for tensor in ignored)}
        self._alive: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._add(leaf.untyped_storage())
        self.peak_nbytes = max(self.peak_nbytes, self.nbytes)
        return out

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, nbytes = storage._cdata, storage.nbytes()
        if key in self._ignored or key in self._alive:
            return
        self._alive[key] = weakref.ref(storage, lambda _: self._end(key, nbytes))
        self.nbytes += nbytes

    def _end(self, key: int, nbytes: int) -> None:
        if self._alive.pop(key, None) is not None:
            self.nbytes -= nbytes


def foretell_activations(
    build: Callable[[], nn.Module],
    shape: tuple[int, int],
    rules: ModuleRules,
    own: RecomputePolicy,
    *,
    autocast: str | None = None,
    prepare: Prepare = lambda _: None,
) -> tuple[ActivationNeeds, ...]:
    """The needs of a pass of the model that `build` makes on `shape`, (rows, tokens): with all activations kept, with
    its blocks recomputed, and as in `own` where that is something else. `autocast` names a type, if it is on.

    Raises PolyaccelError for a model that takes no tokens and labels; ConfigError as `RecomputedBlocks` does, and for a
    limit that recomputing everything does not keep.
    """
    ways: dict[str, RecomputePolicy] = {"kept": RecomputePolicy()}
    ways["blocks recomputed"] = RecomputePolicy(recomputes_blocks=True, names=own.names)
    chosen = next((way for way, policy in ways.items() if policy == own), "as in the config")
    ways.setdefault(chosen, own)
    found = []
    for way, policy in ways.items():
        with FakeTensorMode(allow_non_fake_inputs=True), one_sequence_a_row():
            model = build().train()
            as_in_an_engine(model, rules)
            prepare(model)
            kept, peak = _measured(model, shape, policy, autocast)
        found.append(ActivationNeeds(way, kept, peak, way == chosen))
    return tuple(found)


def _measured(
    model: nn.Module, shape: tuple[int, int], policy: RecomputePolicy, autocast: str | None
) -> tuple[int, int]:
    """The bytes kept after forward, and the peak."""
    inputs = token_inputs(model, shape)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(drop_gradient)  # type: ignore[no-untyped-call]
    blocks = None
    if policy.recomputes_blocks:
        blocks = RecomputedBlocks(model, policy, RecomputedRegions(policy, None), lambda: None)
    kept = peak = 0
    for _ in range(2 if policy.memory_limit is not None else 1):  # the first pass with a limit is a trial
        with LiveMemory([*model.parameters(), *model.buffers()]) as live:
            around = nullcontext() if blocks is None else blocks.forward_pass(tuple(inputs.values()))
            with autocast_as(autocast), around:
                loss = model(**inputs)[0]
            kept = live.nbytes
            loss.backward()
            del loss
        peak = live.peak_nbytes
    return kept, peak


def token_inputs(model: nn.Module, shape: Sequence[int]) -> dict[str, Any]:
    """Return a micro-batch of `shape`, (rows, tokens), for `model`."""
    taken = signature(model.forward).parameters
    if not {"input_ids", "labels"} <= set(taken):
        kind = type(model).__name__
        raise PolyaccelError(
            f"the activations of a {kind} cannot be estimated: it does not take input_ids and labels",
            hint="leave --sequence-length out, or give the directory of a language model of transformers, whose "
            "config.json names an architecture with a loss",
            value=kind,
        )
    words = torch.zeros(tuple(shape), dtype=torch.long)
    cache = {"use_cache": False} if "use_cache" in taken else {}
    return {"input_ids": words, "labels": words, "return_dict": False, **cache}


def as_in_an_engine(model: nn.Module, rules: ModuleRules) -> None:
    """Give parameters and buffers the types that they have in an engine."""
    specs = parameter_specs(model, [list(model.parameters())], rules.param_dtype)
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(torch_dtype(specs[name].dtype))
    convert_buffers(model, rules.buffer_dtype, rules.keep_in_fp32)


def drop_gradient(parameter: Tensor) -> None:
    """A hook of a parameter whose gradient goes into a bucket."""
    parameter.grad = None


def autocast_as(dtype: str | None) -> AbstractContextManager[Any]:
    """Autocast to a type by its name; None: off."""
    return nullcontext() if dtype is None else torch.autocast("cpu", getattr(torch, dtype))


@contextmanager
def one_sequence_a_row() -> Iterator[None]:
    """Return one sequence a row: masks by positions would need values, which do not exist here."""
    try:
        from transformers import masking_utils
    except ImportError:
        yield
        return
    name = "find_packed_sequence_indices"
    before = getattr(masking_utils, name, None)
    if before is None:
        yield
        return
    setattr(masking_utils, name, lambda *_, **__: None)
    try:
        yield
    finally:
        setattr(masking_utils, name, before)
