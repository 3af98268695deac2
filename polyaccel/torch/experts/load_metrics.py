"""How the tokens of each step went to the experts of each layer, for `StepMetrics.experts`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from polyaccel.comm.base import Communicator
from polyaccel.comm.collective import Collective
from polyaccel.comm.flight_recorder.log import CommLog
from polyaccel.comm.work import CombinedWork, Work
from polyaccel.comm.wrappers.wrapped import WrappedCommunicator
from polyaccel.core.types import ReduceOp
from polyaccel.observability.metrics import ExpertFigures
from polyaccel.torch.experts.gates import tokens_of
from polyaccel.torch.experts.layer import Mixture
from polyaccel.torch.experts.models import ExpertParallelExperts, are_experts


class ExpertLoadMetrics:
    """Counts what goes to the experts of every layer of `model`, in training mode, until `release`. What is computed
    again in backward passes counts once, except for the time and bytes of its exchanges. `ranks` are those with their
    own batches or parts of sequences."""

    def __init__(self, model: nn.Module, ranks: Communicator) -> None:
        self._ranks = ranks
        chosen_by_experts = {one.experts for one in model.modules() if isinstance(one, Mixture) and one.chooses_tokens}
        self._layers = {
            name: _Layer(module, drops=module not in chosen_by_experts)
            for name, module in model.named_modules()
            if are_experts(module)
        }

    def take(self) -> dict[str, ExpertFigures]:
        """The figures since the last call, by layer. Collective."""
        if not self._layers:
            return {}
        found = [layer.take() for layer in self._layers.values()]
        together = torch.cat(found)
        self._ranks.all_reduce(self._ranks.accelerator.wrap(together), ReduceOp.SUM, label="figures of experts")
        of_layers = together.split_with_sizes([len(one) for one in found])
        return {
            name: _figures(counts.tolist(), *layer.exchanges())
            for (name, layer), counts in zip(self._layers.items(), of_layers, strict=True)
        }

    def release(self) -> None:
        """Watch no longer."""
        for layer in self._layers.values():
            layer.release()


def _figures(counts: list[int], nbytes: int, seconds: float) -> ExpertFigures:
    *tokens, dropped = counts
    total = sum(tokens)
    return ExpertFigures(
        tokens=tuple(tokens),
        dropped_share=dropped / max(total + dropped, 1),
        balance=max(tokens) * len(tokens) / total if total else 1.0,
        exchanged_nbytes=nbytes,
        exchange_s=seconds,
    )


class _Layer:
    """The experts of one layer; `drops`: a choice past the last expert is one that was dropped."""

    def __init__(self, module: nn.Module, *, drops: bool) -> None:
        self._module, self._drops = module, drops
        self._timed: _Timed | None = None
        count: Any = module.num_experts
        if isinstance(module, ExpertParallelExperts):
            spread = module.spread
            self._timed, count = _Timed(spread.communicator), sum(spread.counts)
            module.__dict__["spread"] = spread._replace(communicator=self._timed)
        self._counts = torch.zeros(count + 1, dtype=torch.int64)
        self._hook = module.register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        if not module.training or torch._C._current_graph_task_id() != -1:
            return
        index: Tensor = args[1] if len(args) > 1 else next(iter(named[each] for each in _INDEX if each in named))
        last = len(self._counts) - 1
        counts = tokens_of(index.detach().clamp(max=last), last + 1)
        if not self._drops:
            counts[last] = 0
        self._counts = self._counts.to(counts.device) + counts

    def take(self) -> Tensor:
        """(experts + 1,), int64: the tokens of each, and the choices that were dropped."""
        counts, self._counts = self._counts, torch.zeros_like(self._counts)
        device = next(self._module.parameters()).device
        return counts.to(device)

    def exchanges(self) -> tuple[int, float]:
        """Bytes and seconds since the last call."""
        return (0, 0.0) if self._timed is None else self._timed.take()

    def release(self) -> None:
        self._hook.remove()
        if isinstance(self._module, ExpertParallelExperts) and self._timed is not None:
            self._module.__dict__["spread"] = self._module.spread._replace(communicator=self._timed.inner)


_INDEX = ("top_k_index", "router_indices")


class _Timed(WrappedCommunicator):
    """`inner`, and how many bytes its ranks get of this one, in how many seconds."""

    def __init__(self, inner: Communicator) -> None:
        super().__init__(inner)
        self._log = CommLog(inner.accelerator.current_stream)
        self._sent_nbytes = 0

    def start(self, collective: Collective) -> Work:
        source, counts = collective.source, collective.source_counts
        if source is not None and counts is not None:
            self._sent_nbytes += (source.numel - counts[self.rank]) * source.dtype.itemsize
        timing = self._log.begin(collective, self.world_size)
        work = self.inner.call(collective)
        if timing is None:
            return work
        if not collective.async_op:
            self._log.end(timing)
            return work
        return CombinedWork([work], partial(self._log.end, timing))

    def split(self, ranks: Sequence[int]) -> Communicator | None:
        return self.inner.split(ranks)

    def take(self) -> tuple[int, float]:
        """Bytes and seconds since the last call."""
        nbytes, self._sent_nbytes = self._sent_nbytes, 0
        seconds = sum(sum(each) for each in self._log.latencies_ms().values()) / 1e3
        self._log.reset()
        return nbytes, seconds
