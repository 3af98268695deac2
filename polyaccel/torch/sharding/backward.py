"""The backward passes of an engine: one object begins and ends each, and sets what its gradients are multiplied with.

[Note: Backward pass boundaries]
`TorchEngine.backward` begins a pass before it runs autograd and ends it after. When a user calls `loss.backward()`
instead, the first sign of it (the gradient of an output of the engine, of a sharded module, or of a parameter) begins
the pass, and a callback that autograd runs when the whole backward is done ends it. Begun at an output, that callback
belongs to the outermost backward, so reentrant checkpointing, which runs backwards inside the backward, ends nothing
early. Should a pass end early all the same, what comes after is late or its own pass: slower, never wrong.

[Note: Gradient scale factors]
A gradient is multiplied with 1 / accumulation steps and with the loss scale, and divided by the number of ranks. In a
pass of the engine's own the first two are factors of the loss. In a user's pass `scale` has put the loss scale into the
loss, if there is one. What is missing of both is a factor of each gradient as it arrives: in a pass that another engine
runs too ([Note: Loss through several engines] of `engine_registry`). The ranks are divided by in the reduction
(`ReductionPolicy.scaling`), the loss scale in the update.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from polyaccel.accelerators.base import Accelerator
from polyaccel.core.buffer import Buffer
from polyaccel.engine.counters import StepCounters
from polyaccel.engine.loss_scale import LossScaler
from polyaccel.errors import InvariantError, PolyaccelError
from polyaccel.observability.timing import PhaseTimer
from polyaccel.torch.sharding.engine_registry import BackwardPass, at_least_float32, registry_of_rank
from polyaccel.torch.sharding.gradients import AUTOGRAD_S
from polyaccel.torch.sharding.row_gradient import RowGradient
from polyaccel.zero.engine import ZeroEngine


class LaterProduct(Protocol):
    """Operands of a linear layer's weight gradient; `bias` is None without one.

    A protocol, because `DeferredWGrad` needs the kernels of layers, which are a layer of imports above.
    """

    @property
    def weight(self) -> nn.Parameter: ...

    @property
    def bias(self) -> nn.Parameter | None: ...

    def root(self) -> tuple[Tensor, Tensor]:
        """A root of a backward pass, with its gradient, that gives the parameters theirs."""
        ...

    def write(self, place: Buffer, adds: bool) -> None:
        """Write the weight's gradient to its place, as a `GradientWriter`."""
        ...

    def write_bias(self, place: Buffer, adds: bool) -> None:
        """Write the bias's gradient to its place."""
        ...


class BackwardRunner:
    """Begins and ends the backward passes of an engine, and hands their gradients to its step.

    `attach` says which step and which parameters; before that, and after `release`, no backward is noticed. See
    [Note: Backward pass boundaries] and [Note: Gradient scale factors].
    """

    def __init__(
        self, accelerator: Accelerator, counters: StepCounters, loss_scaler: LossScaler, timer: PhaseTimer
    ) -> None:
        self.reduce = True
        """Whether passes reduce their gradients; False inside `no_sync`."""
        self.is_last: bool | None = None
        """Whether passes of the engine's own end the accumulation; None where the micro-batches decide it."""
        self.keeps_own_scale = False
        """Whether passes of the engine's own have its loss scale, whatever other engines they reach."""
        self.hides_scaled_gradients = False
        """Whether `parameter.grad` is None, with one warning, while gradients are multiplied with a loss scale."""
        self.params_expected: Collection[str] | None = None
        """The parameters that may get a gradient in passes of the engine's own, by name; None: any."""
        self._accelerator = accelerator
        self._counters = counters
        self._loss_scaler = loss_scaler
        self._timer = timer
        self._step: ZeroEngine | None = None
        self._on_end: Callable[[bool], None] = _nothing
        self._handles: list[Any] = []
        self._names: dict[nn.Parameter, str] = {}
        self._held_scale = 1.0
        """The loss scale of the gradients that the step holds."""
        self._factor = 1.0
        """Gradients of the present pass are multiplied with this before they enter their bucket."""
        self._registry = registry_of_rank()
        self.number = self._registry.enter(self)
        self._left: list[tuple[Tensor, Tensor]] | None = None
        self._is_unwatched = False
        """Where gradients of parameters go instead of their buckets, see `defer_weight_grads`."""
        self._is_watched = False
        """A backward without an optimizer is under way, and `_on_end` will be called after it."""

    def attach(self, step: ZeroEngine, trained: Mapping[str, nn.Parameter], on_end: Callable[[bool], None]) -> None:
        """Hand gradients of `trained` to `step`; `on_end` gets whether the pass came to its end."""
        self._step, self._on_end = step, on_end
        self._names = {parameter: fqn for fqn, parameter in trained.items()}
        for fqn, parameter in trained.items():
            hook = self._make_hook(fqn)
            is_frozen = not parameter.requires_grad
            parameter.requires_grad_(True)  # without which torch takes no hook, though it may be frozen for a while
            self._handles.append(parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]
            parameter.requires_grad_(not is_frozen)

    def release(self) -> None:
        """Take all hooks off the parameters."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._names.clear()
        self._step, self._on_end = None, _nothing

    # The engine's own passes.

    def run(self, loss: Tensor, *, retain_graph: bool, accumulates: bool) -> Tensor:
        """Start reducing `loss`'s gradients; return it detached, divided if it `accumulates`."""
        share = self._share if accumulates else 1.0
        root = at_least_float32(loss) * share if share != 1.0 else loss
        shared = root.detach()
        own = self.loss_scale, self.is_scaled
        scale, is_scaled = own if self.keeps_own_scale else self._registry.pass_scale(loss, self)
        with self._own_pass(BackwardPass(scale * share, scale, is_scaled, divides=accumulates, is_of_engine=True)):
            if scale != 1.0:
                root = at_least_float32(root) * scale
            root.backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]
        return shared.to(loss.dtype)

    def run_from(self, outputs: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """Compute the gradients that follow from those of `outputs`, in which all factors are already."""
        with self._own_pass(self._whole_pass()):
            torch.autograd.backward(list(outputs), list(gradients))

    def _whole_pass(self) -> BackwardPass:
        """A pass whose gradients have all of this engine's factors."""
        return BackwardPass(self.loss_scale * self._share, self.loss_scale, self.is_scaled, is_of_engine=True)

    @contextmanager
    def _own_pass(self, one: BackwardPass) -> Iterator[None]:
        with self._timer("backward"), self._registry.run(one):
            self._join(one)
            yield

    def run_products(self, products: list[LaterProduct], roots: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Compute deferred gradients of linear layers, and what follows from `roots`, as one pass."""
        step, roots = self._attached, list(roots)
        with self._own_pass(self._whole_pass()):
            while products:
                product = products.pop(0)  # and what it is made of, when it has been
                weight, bias = self._names.get(product.weight), self._names.get(product.bias)  # type: ignore[arg-type]
                is_ours = self._is_unseen(product.weight) and self._is_unseen(product.bias)
                if not is_ours or weight is None:
                    roots.append(product.root())
                    continue
                step.reducer.add_gradient(weight, product.write)
                if bias is not None:
                    step.reducer.add_gradient(bias, product.write_bias)
            if roots:
                torch.autograd.backward([one for one, _ in roots], [one for _, one in roots])

    def _is_unseen(self, parameter: nn.Parameter | None) -> bool:
        """Whether the gradient of a parameter is for the engine alone, and whole here; of None too."""
        if parameter is None:
            return True
        hooks = parameter._post_accumulate_grad_hooks
        is_hooked = parameter._backward_hooks or hooks is None or len(hooks) != 1
        return parameter in self._names and not is_hooked and not self._attached.params.is_any_sharded

    @contextmanager
    def defer_weight_grads(self, left: list[tuple[Tensor, Tensor]]) -> Iterator[None]:
        """Collect parameters' gradients of inner passes in `left`, for `run_from`, not for the step."""
        self._left = left
        try:
            yield
        finally:
            self._left = None

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Passes inside accumulate on this rank only; the first one outside reduces what they left."""
        if not self.reduce:
            raise InvariantError("no_sync is nested in no_sync", hint="use one at a time")
        self.reduce = False
        try:
            yield
        finally:
            self.reduce = True

    # Passes that a user's `loss.backward()` starts.

    @property
    def loss_scale(self) -> float:
        """The gradients that the step holds were multiplied with this."""
        return self._loss_scaler.loss_scale

    @property
    def is_scaled(self) -> bool:
        """Whether the engine trains with a loss scale, which may be 1 for a while."""
        is_trained = self._step is not None and self._step.optimizer is not None
        return is_trained and self._loss_scaler.is_active

    @property
    def _share(self) -> float:
        return 1.0 / self._counters.gradient_accumulation_steps

    def scale(self, loss: Tensor) -> Tensor:
        """`loss` times the loss scale; the next pass is begun by its user."""
        return self._registry.scale(loss, self)

    def watch_outputs(self, outputs: Any) -> None:
        """Begin a pass when the gradient of any of `outputs` appears."""
        for leaf in tree_leaves(outputs):
            if isinstance(leaf, Tensor) and leaf.requires_grad and leaf.grad_fn is not None:
                self._registry.mark_output(leaf, self.number)
                leaf.register_hook(self._on_output_gradient)  # type: ignore[no-untyped-call]

    @contextmanager
    def unwatched(self) -> Iterator[None]:
        """Inside, gradients of outputs begin no pass: they are not those of the step."""
        self._is_unwatched = True
        try:
            yield
        finally:
            self._is_unwatched = False

    def on_user_backward(self) -> None:
        """Begin or join the pass of a user's backward; called inside autograd."""
        if self._is_unwatched or self._step is None or self._step.reducer.in_backward or self._left is not None:
            return
        one = self._registry.running() or self._registry.begin(BackwardPass())
        if self._step.optimizer is None:  # gradients of something else, through parameters that are gathered for it
            if self not in one.taking_part:
                self._is_watched = True
                one.taking_part.append(self)
            return
        try:
            if self.is_scaled and self.loss_scale != 1.0 and not one.is_scaled:
                raise PolyaccelError(
                    f"backward was called on a loss that is not scaled for engine {self.number}, which trains in fp16: "
                    "small gradients would vanish",
                    hint="call engine.backward(loss) of that engine, or engine.scale(loss).backward()",
                    value=self.number,
                )
            self._join(one)
        except BaseException:
            self._registry.forget(one)
            raise

    def _on_output_gradient(self, gradient: Tensor) -> None:
        self.on_user_backward()

    def _make_hook(self, fqn: str) -> Callable[[nn.Parameter], None]:
        passes = ref(self)  # Python's garbage collector does not see the references of a parameter's hooks

        def take(parameter: nn.Parameter) -> None:
            self = passes()
            gradient = AUTOGRAD_S.__get__(parameter)
            if gradient is None or self is None or self._step is None:
                return
            AUTOGRAD_S.__set__(parameter, None)
            if self._left is not None:
                with torch.enable_grad():
                    self._left.append((parameter.view_as(parameter), gradient.to_dense()))
                return
            self.on_user_backward()
            if self._factor != 1.0:
                gradient.mul_(self._factor)
            reducer, wrap = self._step.reducer, self._accelerator.wrap
            if reducer.takes_rows(fqn):
                rows = RowGradient.from_gradient(gradient)
                reducer.add_gradient(fqn, rows.write, wrap(rows.indices))
            else:  # of an embedding with sparse=True too: a bucket has a place for every row
                reducer.add_gradient(fqn, wrap(gradient.to_dense().contiguous()))

        return take

    # Every pass.

    def _join(self, one: BackwardPass) -> None:
        """Take part in a pass."""
        step = self._attached
        if not step.holds_gradients:
            self._held_scale = self.loss_scale
        self.require_one_scale()
        if self._left is None:
            self._factor = self.loss_scale * (self._share if one.divides else 1.0) / one.factor
            is_last = self._counters.is_boundary if self.is_last is None else self.is_last
            reduces = self.reduce and step.policy.reduces_pass(is_last=is_last)
            step.begin_backward(reduce=reduces, names=self.params_expected, waits_for_end=bool(one.taking_part))
        one.taking_part.append(self)

    def require_one_scale(self) -> None:
        """Raise PolyaccelError where the loss scale changed while gradients are held."""
        if self._attached.holds_gradients and self._held_scale != self.loss_scale:
            raise PolyaccelError(
                f"the loss scale changed from {self._held_scale:g} to {self.loss_scale:g} under gradients that were "
                "multiplied with the first",
                hint="change it between optimizer steps, or call engine.zero_grad() and start over",
                value=self.loss_scale,
            )

    def end_backward(self) -> None:
        """Autograd has done, and the gradients are there."""
        if self._left is not None:
            return
        if self._is_watched:
            self._is_watched = False
            self._on_end(True)
            return
        with self._timer("reduce"):
            self._on_end(True)
            self._attached.reducer.end_backward()

    def abort_backward(self) -> None:
        """Autograd raised: launch nothing more, for reducing half a pass could leave the other ranks waiting."""
        self._is_watched = False
        self._attached.reducer.abort_backward()
        self._on_end(False)

    def close(self) -> None:
        """The engine is closed."""
        self._registry.leave(self.number)

    @property
    def _attached(self) -> ZeroEngine:
        assert self._step is not None  # passes begin after `attach`, and end before `release`
        return self._step


def _nothing(is_whole: bool) -> None:
    pass
