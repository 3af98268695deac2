"""What the parity and engine tests share: a small awkward model, its data, runs under the engine, and plain torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from threading import RLock
from typing import Any

import torch
from torch import Tensor, nn

import polyaccel
from polyaccel.comm.base import Communicator
from polyaccel.testkit.ranks.threads import run_threads

VOCAB = 17
SMALL_BUCKET = 64
"""Elements: far below the model's parameters, so that there are many buckets, one of them for a single parameter."""
SMALL = {"reduce_bucket_size": SMALL_BUCKET}

Config = dict[str, Any]
Params = dict[str, Tensor]
LossFn = Callable[[Any, int, int, int], Tensor]
"""The loss of a model (or engine) on the micro-batch at (step, micro, rank)."""
Statement = Callable[[nn.Module], Any]
"""What a script does to a model between two calls of the engine."""
_DRAWING = RLock()


@contextmanager
def drawn_from(seed: int) -> Iterator[None]:
    """In the block torch's generator is at the beginning of `seed`, for this thread alone: ranks that are threads share
    that generator, and each would draw what the other one has left."""
    with _DRAWING, torch.random.fork_rng():
        torch.manual_seed(seed)
        yield


def engine_for(module: nn.Module, config: Config, **arguments: Any) -> Any:
    engine, *_ = polyaccel.initialize(model=module, config=config, **arguments)
    return engine


def grouped_engine(module: nn.Module, config: Config, **arguments: Any) -> Any:
    """An engine whose optimizer has the groups of `grouped`."""
    return engine_for(module, config, model_parameters=grouped(module), **arguments)


def nothing(model: nn.Module) -> None:
    """A script that leaves the model alone."""


class ParityModel(nn.Module):
    """Tied (embed, head), frozen, unused, zero-dimensional, odd-sized, and twice-used parameters; returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 6)
        self.wide = nn.Linear(6, 33)
        self.narrow = nn.Linear(33, 6)
        self.twice = nn.Linear(6, 6)
        self.head = nn.Linear(6, VOCAB, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor(1.3))
        self.unused = nn.Parameter(torch.randn(5))
        self.frozen = nn.Parameter(torch.randn(6), requires_grad=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        hidden = self.embed(tokens) + self.frozen
        hidden = hidden + self.narrow(torch.tanh(self.wide(hidden))) * self.scale
        hidden = hidden + torch.tanh(self.twice(torch.tanh(self.twice(hidden))))
        return nn.functional.cross_entropy(self.head(hidden).float(), targets)


def parity_model() -> ParityModel:
    """The same model every time."""
    with drawn_from(0):
        return ParityModel()


def batch(step: int, micro: int, rank: int, size: int = 4) -> tuple[Tensor, Tensor]:
    """The tokens and targets of one micro-batch, a function of where it stands."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
    return tuple(torch.randint(0, VOCAB, (size,), generator=generator) for _ in range(2))  # type: ignore[return-value]


def grouped(model: nn.Module) -> list[dict[str, Any]]:
    """Two optimizer groups: matrices decay, the rest does not and learns faster."""
    members: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for parameter in model.parameters():
        if parameter.requires_grad:
            members[parameter.dim() > 1].append(parameter)
    return [{"params": members[True], "weight_decay": 0.1}, {"params": members[False], "weight_decay": 0.0, "lr": 2e-2}]


def make_config(stage: int, *, accumulation: int = 1, **changes: Any) -> Config:
    """AdamW at `stage`; `changes` replace keys of the config, those of `zero` keys of `zero_optimization`."""
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": accumulation,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": stage, **changes.pop("zero", {})},
        **changes,
    }


@dataclass
class Run:
    """What a training run left behind, on one rank."""

    params: Params
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)


def snapshot(module: nn.Module) -> Params:
    """Copies of the module's parameters."""
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


def parity_loss(model: Any, step: int, micro: int, rank: int) -> Tensor:
    loss: Tensor = model(*batch(step, micro, rank))
    return loss


def train(
    communicator: Communicator,
    model: nn.Module,
    config: Config,
    steps: int,
    loss_fn: LossFn = parity_loss,
    groups: Callable[[nn.Module], Any] = grouped,
    before_update: Statement = nothing,
    **arguments: Any,
) -> Run:
    """Train `model` on this rank's batches; `arguments` go to initialize."""
    engine, *_ = polyaccel.initialize(model=model, model_parameters=groups(model), config=config, **arguments)
    run = Run({})
    for step in range(steps):
        for micro in range(engine.gradient_accumulation_steps()):
            loss = loss_fn(engine, step, micro, communicator.rank)
            engine.backward(loss)
            if engine.is_gradient_accumulation_boundary():
                before_update(model)
            engine.step()
            run.losses.append(loss.item())
        run.norms.append(engine.get_global_grad_norm())
    engine.destroy()
    run.params = snapshot(model)
    return run


def on_threads(world: int, fn: Callable[..., Any], build: Callable[[], nn.Module], *args: Any) -> list[Any]:
    """`fn(communicator, model, *args)` on every rank, each with a model of its own that was built before."""
    models = [build() for _ in range(world)]
    return run_threads(world, lambda communicator: fn(communicator, models[communicator.rank], *args))


def train_on_threads(
    world: int,
    config: Config,
    steps: int,
    *,
    build: Callable[[], nn.Module] = parity_model,
    loss_fn: LossFn = parity_loss,
    groups: Callable[[nn.Module], Any] = grouped,
    before_update: Statement = nothing,
) -> Run:
    """`train` on threads. All ranks must end with the same parameters; returns rank 0's run."""
    runs: list[Run] = on_threads(world, train, build, deepcopy(config), steps, loss_fn, groups, before_update)
    for run in runs[1:]:
        assert_bitwise(run.params, runs[0].params)
        assert run.norms == runs[0].norms
    return runs[0]


def train_plainly(
    world: int,
    steps: int,
    *,
    accumulation: int = 1,
    clip: float = 0.0,
    param_dtype: torch.dtype | None = None,
    gradient_factor: float = 1.0,
    make_optimizer: Callable[[Any], torch.optim.Optimizer] = lambda groups: torch.optim.AdamW(groups, lr=1e-2),
    build: Callable[[], nn.Module] = parity_model,
    loss_fn: LossFn = parity_loss,
    groups: Callable[[nn.Module], Any] = grouped,
    before_update: Statement = nothing,
) -> Run:
    """One plain torch process that sees all ranks' batches: parameters in `param_dtype` (None: as built), updated in
    the type that they were built with.

    `gradient_factor` multiplies the averaged gradients. A parameter without a gradient on any rank has none.
    `before_update` is what the script does to the model when the gradients are there.
    """
    masters, model = build(), build()
    if param_dtype is not None:
        model.to(param_dtype)
    optimizer = make_optimizer(groups(masters))
    run = Run({})
    for step in range(steps):
        with torch.no_grad():
            for parameter, master in zip(model.parameters(), masters.parameters(), strict=True):
                parameter.copy_(master)
        optimizer.zero_grad()
        for micro in range(accumulation):
            for rank in range(world):
                model.zero_grad()
                loss = loss_fn(model, step, micro, rank)
                (loss / accumulation).backward()
                _add_gradients(masters, model, gradient_factor / world)
                if rank == 0:
                    run.losses.append(loss.item())
        before_update(masters)
        norm = torch.nn.utils.clip_grad_norm_(masters.parameters(), clip or float("inf"))
        run.norms.append(float(norm))
        optimizer.step()
    run.params = {name: master.detach().to(param_dtype or master.dtype) for name, master in masters.named_parameters()}
    return run


def _add_gradients(masters: nn.Module, model: nn.Module, factor: float) -> None:
    for master, parameter in zip(masters.parameters(), model.parameters(), strict=True):
        if parameter.grad is not None:
            gradient = parameter.grad.to(master.dtype) * factor
            master.grad = gradient if master.grad is None else master.grad + gradient


def assert_bitwise(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    """Equal names, types and bits."""
    assert found.keys() == wanted.keys()
    different = [name for name in found if found[name].dtype != wanted[name].dtype]
    different += [name for name in found if not torch.equal(found[name], wanted[name])]
    assert not different, different


def assert_close(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor], tolerance: float = 2e-6) -> None:
    """Equal names; values within `tolerance`, absolute."""
    assert found.keys() == wanted.keys()
    errors = {name: float((found[name].double() - wanted[name].double()).abs().max()) for name in found}
    assert max(errors.values()) <= tolerance, {name: error for name, error in errors.items() if error > tolerance}


def relative_distance(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor], start: Mapping[str, Tensor]) -> float:
    """How far apart two trainings ended, as a share of how far the second one came from `start` (all in L2)."""
    apart = sum(float((found[name].double() - wanted[name].double()).square().sum()) for name in wanted)
    came = sum(float((wanted[name].double() - start[name].double()).square().sum()) for name in wanted)
    return (apart / came) ** 0.5
