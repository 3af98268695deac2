"""The engines of this rank: which of them holds a parameter, and the backward pass that runs through several of them.

[Note: Loss through several engines]
A backward pass belongs to the whole graph, not to one engine. Its loss is multiplied once, with the pass's loss scale
and, in `engine.backward`, with that engine's share of its accumulation. Every engine that the pass reaches multiplies
its gradients with what is missing for its own scale and its own share. The pass's loss scale is the smallest of those
of the engines whose outputs are in the graph, so that no engine overflows by another one's scale.

The engine that begins a pass reduces while the pass runs, the others when it is over, in the order in which they were
made: their gradients may interleave differently on each rank, and collectives must not.

[Note: Parameter hand-over]
A parameter has one engine. Where a new engine gets all parameters of an older one, or some of them and no others, the
older one hands them over: it is closed as by `destroy()`, and refuses by name what would train it. Where each of the
two has other parameters too, both would be trained, and that is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from logging import getLogger
from threading import get_ident
from typing import Any, Protocol
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

from polyaccel.comm.base import Communicator
from polyaccel.comm.default import default_communicator, own_thread_communicator
from polyaccel.errors import PolyaccelError, ShardingError
from polyaccel.torch.sharding.ownership import ParameterOwner, record_of

log = getLogger(__name__)

_ENGINES, _SCALE = "polyaccel_engines", "polyaccel_loss_scale"
"""Keys in the metadata of a node of autograd's graph: the engines whose output it made, and the loss scale that it
multiplied with."""


class PassParticipant(Protocol):
    """An engine as a backward pass sees it."""

    number: int
    """Engines count from 1 in the order in which they were made."""

    @property
    def loss_scale(self) -> float: ...

    @property
    def is_scaled(self) -> bool:
        """Whether it trains with a loss scale, which may be 1 for a while."""

    def end_backward(self) -> None:
        """Autograd is done."""

    def abort_backward(self) -> None:
        """Autograd raised."""


@dataclass(eq=False)
class BackwardPass:
    """A backward pass that runs now. Gradients in it are multiplied with `factor`.

    `scale` is the loss scale in that factor. `is_scaled`: an engine of fp16 may take part. `divides`: each engine
    divides by its accumulation steps. `is_of_engine`: `engine.backward` runs it, and a user's `backward()` otherwise.
    """

    factor: float = 1.0
    scale: float = 1.0
    is_scaled: bool = False
    divides: bool = True
    is_of_engine: bool = False
    taking_part: list[PassParticipant] = field(default_factory=list)
    """The engines that the pass has reached, that of `engine.backward` first."""

    def end(self) -> None:
        """Autograd is done: every engine reduces what is left, in the order in which the engines were made."""
        for one in self._in_order():
            one.end_backward()

    def abandon(self) -> None:
        """Autograd raised: no engine reduces any more."""
        for one in self._in_order():
            one.abort_backward()

    def _in_order(self) -> list[PassParticipant]:
        found, self.taking_part = sorted(self.taking_part, key=lambda one: one.number), []
        return found


class EngineRegistry:
    """The engines of one rank. See [Note: Loss through several engines]."""

    def __init__(self) -> None:
        self._count = 0
        self._engines: dict[int, ref[PassParticipant]] = {}
        self._running: dict[int, ref[BackwardPass]] = {}
        """The passes that run, by the thread that began each. A user's pass lives as long as autograd's callback."""

    def enter(self, engine: PassParticipant) -> int:
        """Register an engine; returns its number, which counts from 1."""
        self._count += 1
        self._engines[self._count] = ref(engine)
        return self._count

    @property
    def next_number(self) -> int:
        """The number of the next engine."""
        return self._count + 1

    def leave(self, number: int) -> None:
        """An engine is closed."""
        self._engines.pop(number, None)

    def _living(self) -> dict[int, PassParticipant]:
        found = {number: one for number, at in self._engines.items() if (one := at()) is not None}
        if len(found) < len(self._engines):
            self._engines = {number: ref(one) for number, one in found.items()}
        return found

    # The pass that runs.

    def running(self) -> BackwardPass | None:
        """The backward pass that is under way. Raises PolyaccelError where several threads run one."""
        passes = {thread: one for thread, at in self._running.items() if (one := at()) is not None}
        self._running = {thread: ref(one) for thread, one in passes.items()}
        if len(passes) > 1 and get_ident() not in passes:  # a device's own thread runs parts of several passes
            raise PolyaccelError(
                "several threads run backward passes through engines at once",
                hint="run one backward pass at a time",
                value=len(passes),
            )
        return passes.get(get_ident()) or next(iter(passes.values()), None)

    @contextmanager
    def run(self, one: BackwardPass) -> Iterator[None]:
        """Around a pass that an engine runs; it is ended, or abandoned where autograd raises."""
        thread = get_ident()
        before = self._running.get(thread)
        self._running[thread] = ref(one)
        try:
            yield
        except BaseException:
            one.abandon()
            raise
        finally:
            if before is None:
                del self._running[thread]
            else:
                self._running[thread] = before
        one.end()

    def begin(self, one: BackwardPass) -> BackwardPass:
        """Begin a user's pass, inside of autograd, which ends it."""
        thread = get_ident()
        self._running[thread] = ref(one)

        def end() -> None:
            self._running.pop(thread, None)
            one.end()

        after_backward(end)
        return one

    def forget(self, one: BackwardPass) -> None:
        """A user's pass has failed."""
        self._running = {thread: at for thread, at in self._running.items() if at() is not one}

    # What a loss is multiplied with.

    def mark_output(self, output: Tensor, number: int) -> None:
        """Remember that engine `number` has made `output`."""
        if output.grad_fn is not None:
            _notes(output.grad_fn).setdefault(_ENGINES, set()).add(number)

    def pass_scale(self, loss: Tensor, owner: PassParticipant) -> tuple[float, bool]:
        """Return the loss scale of a pass from `loss`, and whether fp16 engines may take part."""
        living = self._living()
        scaled = {number for number, one in living.items() if one.is_scaled}
        if not scaled:
            return 1.0, False
        found = {owner.number}
        if len(living) > 1:
            for node in _graph(loss):
                found |= _notes(node).get(_ENGINES, set())
        scales = [living[number].loss_scale for number in found & scaled]
        return min(scales, default=1.0), bool(scales)

    def scale(self, loss: Tensor, owner: PassParticipant) -> Tensor:
        """Return `loss` times the loss scale once, for a pass that its user begins."""
        node = loss.grad_fn
        if node is not None and _SCALE in _notes(node):
            return loss
        factor, is_scaled = self.pass_scale(loss, owner)
        if len(self._living()) > 1 and any(_SCALE in _notes(each) for each in _graph(loss)):
            raise PolyaccelError(
                "a part of the loss is multiplied with a loss scale already",
                hint="add up the losses first, then call scale of one engine for the sum",
                value=factor,
            )
        scaled = at_least_float32(loss) * factor
        if scaled.grad_fn is not None:
            _notes(scaled.grad_fn)[_SCALE] = factor
            scaled.register_hook(self._on_scaled(factor, is_scaled=is_scaled))  # type: ignore[no-untyped-call]
        return scaled

    def _on_scaled(self, factor: float, *, is_scaled: bool) -> Callable[[Tensor], Tensor | None]:
        def correct(gradient: Tensor) -> Tensor | None:
            one = self.running()
            if one is None:
                self.begin(BackwardPass(factor, factor, is_scaled))
                return None
            wanted = 1.0 if one.is_of_engine else one.scale  # an engine's pass is scaled at its root
            return None if wanted == factor else gradient * (wanted / factor)

        return correct


_process_registry = EngineRegistry()
_thread_registries: WeakKeyDictionary[Communicator, EngineRegistry] = WeakKeyDictionary()


def registry_of_rank() -> EngineRegistry:
    """The registry of this process, or of the rank that this thread runs."""
    of_thread = own_thread_communicator()
    return _process_registry if of_thread is None else _thread_registries.setdefault(of_thread, EngineRegistry())


def _notes(node: Any) -> dict[str, Any]:
    """What is kept with a node of autograd's graph."""
    notes: dict[str, Any] = node.metadata
    return notes


def _graph(loss: Tensor) -> Iterator[Any]:
    """The nodes of the graph of `loss`."""
    waiting, seen = [loss.grad_fn], {loss.grad_fn}
    while waiting:
        node = waiting.pop()
        if node is None:
            continue
        yield node
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)


def after_backward(function: Callable[[], None]) -> None:
    """Call `function` when the outermost backward that is running now is done."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


def at_least_float32(loss: Tensor) -> Tensor:
    """`loss` in a type in which it can be scaled: float32 for 16-bit ones, else its own."""
    return loss.float() if loss.dtype.itemsize < torch.float32.itemsize else loss


# Parameters that have an engine.


class Closable(Protocol):
    """An engine that can be closed."""

    def destroy(self) -> None: ...


class EngineParameters:
    """The parameters of an engine, as far as they can be handed over. See [Note: Parameter hand-over]."""

    module: nn.Module
    engine_number: int
    taken_by = ""
    """The engine that has the parameters now, where they were handed over."""
    engine_ref: Callable[[], Closable | None] = staticmethod(lambda: None)
    """Gives the engine, while it is there."""

    def release(self) -> None:
        """Let the parameters have their values in separate memory."""

    @property
    def engine_name(self) -> str:
        """The engine in messages: its number, and the class of its model."""
        return f"engine {self.engine_number} ({type(self.module).__name__})"

    def hand_over(self, to: str) -> None:
        """Close the engine, whose parameters `to` gets. Collective where they are sharded."""
        engine = self.engine_ref()
        if engine is not None:
            engine.destroy()
        else:  # it is gone, and its hooks on the module have kept this
            self.release()
        self.taken_by = to

    def require_not_handed_over(self) -> None:
        """Raise ShardingError where another engine has the parameters now."""
        if self.taken_by:
            raise ShardingError(
                f"{self.engine_name} has handed its parameters over to {self.taken_by}",
                hint="continue with that engine, or call polyaccel.initialize again for this one's model",
                value=self.taken_by,
            )


def load(model: nn.Module) -> None:
    """Let engines hand `model`'s parameters to a new one. Collective where they are sharded."""
    parameters = list(model.parameters())
    owners: dict[ParameterOwner, int] = {}
    for parameter in parameters:
        home = record_of(parameter)
        if home is not None and home.owner is not None:
            owners[home.owner] = owners.get(home.owner, 0) + 1
    to = f"engine {registry_of_rank().next_number} ({type(model).__name__})"
    for owner, shared in owners.items():
        if shared < len(owner.names) and shared < len(parameters):
            name = next(home.fqn for one in parameters if (home := record_of(one)) and home.owner is owner)
            raise ShardingError(
                f"{owner.engine_name} and {to} share {shared} parameters, {name!r} first, and each has others too",
                hint="give both parts to one engine, as modules of one model; or call destroy() on the first engine; "
                "or keep the shared part outside of both, where it is frozen",
                value=(owner.engine_name, to),
            )
    for owner in sorted(owners, key=lambda one: one.engine_number):
        if default_communicator().rank == 0:
            sentence = "%s hands its parameters over to %s and is closed: call its destroy() first if that is meant"
            log.warning(sentence, owner.engine_name, to)
        owner.hand_over(to)
