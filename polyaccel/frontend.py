"""`polyaccel.initialize`, and the command-line arguments that it reads.

Torch modules go to the torch frontend, functions with their parameters to that of JAX.
"""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, overload

from polyaccel.core.install_line import install_line
from polyaccel.errors import ConfigError, PolyaccelError, Problem

if TYPE_CHECKING:
    from pathlib import Path

    import jax
    import torch

    from polyaccel.config import Config
    from polyaccel.config.inference import InferenceSource
    from polyaccel.jax.engine import JaxEngine
    from polyaccel.torch.engine.inference_engine import InferenceEngine
    from polyaccel.torch.engine.torch_engine import TorchEngine

    ConfigSource: TypeAlias = str | Path | Mapping[str, Any] | Config
    OptimizerLike: TypeAlias = torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer]
    StateReduction: TypeAlias = Literal["mean", "none"] | Callable[[str], Literal["mean", "none"]]

_JAX_HOMES = frozenset({"equinox", "flax"})


@overload
def initialize(
    args: Any = None,
    model: torch.nn.Module | None = None,
    optimizer: OptimizerLike | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int | None = None,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: ConfigSource | None = None,
    mesh_param: Sequence[int] | None = None,
    config_params: ConfigSource | None = None,
    *,
    params: None = None,
) -> tuple[TorchEngine, Any, Any, Any]: ...


@overload
def initialize(
    args: Any = None,
    model: Callable[..., Any] | Sequence[Callable[..., Any]] | None = None,
    optimizer: Any = None,
    *,
    params: Any,
    state: Any = None,
    state_reduction: StateReduction = "mean",
    seed: int | None = None,
    stacked: Sequence[str] = (),
    mesh: jax.sharding.Mesh | None = None,
    param_specs: Any = None,
    batch_spec: jax.sharding.PartitionSpec | None = None,
    axis_rules: Any = None,
    distributed_port: int | None = None,
    dist_init_required: bool | None = None,
    config: ConfigSource | None = None,
    config_params: ConfigSource | None = None,
) -> JaxEngine: ...


def initialize(
    args: Any = None,
    model: Any = None,
    optimizer: Any = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int | None = None,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: ConfigSource | None = None,
    mesh_param: Any = None,
    config_params: ConfigSource | None = None,
    *,
    params: Any = None,
    state: Any = None,
    state_reduction: StateReduction | None = None,
    seed: int | None = None,
    stacked: Sequence[str] = (),
    mesh: jax.sharding.Mesh | None = None,
    param_specs: Any = None,
    batch_spec: jax.sharding.PartitionSpec | None = None,
    axis_rules: Any = None,
) -> Any:
    """Build a training engine around `model`. The positional arguments are DeepSpeed's, in DeepSpeed's order.

    Collective: every rank calls it. It joins the default process group if there is none (see `dist_init_required`), and
    all ranks start with rank 0's parameters.

    Args:
        args: Parsed command-line arguments. `args.deepspeed_config` is the config if no other is given.
        model: A `torch.nn.Module`. For JAX: a function `fn(params, batch, rng)` that returns a scalar loss or (loss,
            auxiliary output); a module of flax or equinox, or a `flax.nnx.ModelAndOptimizer`; or the layers of a
            pipeline, a list of functions `layer(params, value, rng)`, the last of which gets (value, labels) and
            returns the loss.
        optimizer: Optimizer that overrides the config's. For torch an instance, or a callable that makes one from
            parameters; for JAX an elementwise optax transformation, or a `flax.nnx.Optimizer` that has it.
        model_parameters: Parameters to train, or dicts of optimizer groups. None takes all of the torch module.
        training_data: A torch Dataset or `polyaccel.data.WholeStream`, of which each rank gets its
            own micro-batches; or a loader with `state_dict` and `load_state_dict`, whose state checkpoints hold.
        lr_scheduler: Schedule that overrides the config's: an instance, or a callable that makes one from the
            optimizer.
        distributed_port: Port of the rendezvous if MASTER_PORT is not set; None as in `init_distributed`.
        mpu: Model-parallel unit of Megatron's shape, whose sizes define the mesh and whose groups must be the mesh's.
            The model is already cut: in tensors (Megatron's marks on parameters, or `parallel_cuts`) or in sequences.
        dist_init_required: False if the default process group must exist already.
        collate_fn: Makes a batch from a list of samples of `training_data`.
        config: DeepSpeed's JSON as a path, a dict or url-safe base64, or a `Config`.
        mesh_param: (data-parallel ranks, sequence-parallel ranks), for a model that shards its sequences itself.
        config_params: DeepSpeed's older name of `config`.
        params: For JAX: pytree of the function's parameters, whose floating leaves are trained; a list of pytrees for a
            list of functions; or a flax `TrainState`, of which all is taken, its steps and optimizer states too. Or a
            module of nnx or equinox, or a dict of them: the function is then `fn(module, batch, rng)`.
        state: For JAX: pytree of arrays that the function carries, such as running statistics, counters and random
            keys. The function is then `fn(params, state, batch, rng)` and returns (loss, new state), or (loss, (new
            state, auxiliary output)). The engine replaces the state after each micro-batch; `engine.state` is its
            value. For a module of linen a mapping of collections, for one of equinox its `equinox.nn.State`, for a list
            of layers a list with the state of each, None for one without.
        state_reduction: For JAX: what ranks make of the state at the accumulation boundary. "mean" averages floating
            leaves, and others must be equal. "none" keeps each rank's own. A function of a leaf's dotted name returns
            one of the two.
        seed: For JAX: seed of the random keys that the function gets; None is 0.
        stacked: For JAX: names of the subtrees of `params` whose arrays have a leading axis over layers, for
            `polyaccel.jax.scan_units`.
        mesh: For JAX with `"jax": {"execution": "native"}`: the script's own mesh, with axes of the type Auto. The
            function is then a program of all its devices, as under plain `jax.jit`. None also takes the mesh on which
            `params` lie already.
        param_specs: Tree of `PartitionSpec` for `params`, or for subtrees; None leaves parameters whole.
        batch_spec: `PartitionSpec` of a batch's first dimension; None cuts it along the axes that no parameter uses.
            ZeRO cuts optimizer states along the same axes.
        axis_rules: Pairs of a name and an axis, several or None, as for `flax.linen.logical_axis_rules`: what becomes
            of the names of dimensions that parameters of flax have. They precede the engine's own rules for the axes
            that the config asks for (`"mesh": {"tensor": 2}`); with `mesh=` there are no others.

    Returns:
        `(engine, optimizer, training_dataloader, lr_scheduler)` for a torch module, with None for each that was not
        requested. The `JaxEngine` alone for JAX.

    Raises:
        ConfigError: The config is wrong; the error lists every problem.
        ShardingError: Parameters or the optimizer cannot be sharded as requested.
        CommError: The ranks cannot join the process group.
        PolyaccelError: An argument belongs to the other framework, a feature does not exist, or the framework is not
            installed or too old.

    Example:
        ```python
        config = {"train_batch_size": 32, "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}}
        engine, _, loader, _ = polyaccel.initialize(model=model, training_data=data, config=config)
        for x, y in loader:
            loss = torch.nn.functional.mse_loss(engine(x.to(engine.device)), y.to(engine.device))
            engine.backward(loss)
            engine.step()
        ```
    """
    home: Literal["torch", "jax"] = "jax" if params is not None or _is_of(model, _JAX_HOMES) else "torch"
    of_torch = {
        "model_parameters": model_parameters,
        "training_data": training_data,
        "lr_scheduler": lr_scheduler,
        "collate_fn": collate_fn,
        "mpu": mpu,
        "mesh_param": mesh_param,
    }
    of_jax = {
        "params": params,
        "state": state,
        "state_reduction": state_reduction,
        "seed": seed,
        "stacked": stacked or None,
        "mesh": mesh,
        "param_specs": param_specs,
        "batch_spec": batch_spec,
        "axis_rules": axis_rules,
    }
    _refuse_foreign("a torch module" if home == "torch" else "JAX", of_jax if home == "torch" else of_torch)
    frontend = _load_frontend(home)
    if model is None:
        swapped = args is not None and callable(args)
        hint = "pass it as model=; the first argument is args" if swapped else "pass model=, a torch.nn.Module"
        raise PolyaccelError("initialize was called without a model", hint=hint)
    both = {
        "optimizer": optimizer,
        "distributed_port": distributed_port,
        "dist_init_required": dist_init_required,
        "config": _the_config(args, config, config_params),
    }
    if home == "torch":
        return frontend.initialize(model, **both, **of_torch)
    carried = {"state": state, "state_reduction": state_reduction or "mean"}
    places = {"mesh": mesh, "param_specs": param_specs, "batch_spec": batch_spec, "axis_rules": axis_rules}
    return frontend.initialize(model, params, seed=seed or 0, stacked=stacked, **carried, **places, **both)


def init_inference(
    model: torch.nn.Module | None = None, config: InferenceSource | None = None, **named: Any
) -> InferenceEngine:
    """Build an engine around a torch module that computes and generates, and trains nothing. Collective.

    Keys are those of the table below. They may stand in `config`, or be given by name.

    | key | default | does |
    |---|---|---|
    | `dtype` | None | holds parameters as "fp32", "bf16" or "fp16"; "int8" is for weights of linear layers alone |
    | `group_size` | 128 | weights of a row that share a scale under "int8" |
    | `tensor_parallel` | `{"tp_size": 1}` | cuts layers over so many ranks |
    | `checkpoint` | None | loads weights: our checkpoints, safetensors, bin, or what an importer reads |
    | `max_out_tokens` | None | bounds prompt and new tokens of a sequence |
    | `replace_with_kernel_inject` | False | has no effect, and the log reports so |

    Args:
        model: A `torch.nn.Module`. Its parameters may have no values yet where `checkpoint` has them.
        config: Keys as a path of a JSON file, a dict or url-safe base64.
        **named: Keys by name.

    Returns:
        The engine, in evaluation mode.

    Raises:
        ConfigError: A key is unknown or has a wrong value, or two different ones.
        CheckpointError: The checkpoint cannot be read, or lacks parameters.
        ShardingError: The model cannot be cut over tensor ranks.
        PolyaccelError: `model` is not a torch module, or torch is not installed.

    Example:
        ```python
        engine = polyaccel.init_inference(model, dtype="bf16", tensor_parallel={"tp_size": 1})
        logits = engine(tokens).logits
        texts = engine.generate(tokens, max_new_tokens=16)
        ```
    """
    from polyaccel.config.inference import load_inference_config

    _load_frontend("torch")
    found = load_inference_config(config, named)
    frontend, engines = (import_module(f"polyaccel.torch.{name}") for name in ("inference", "engine.inference_engine"))
    engine: InferenceEngine = frontend.init_inference(model, found, engines.InferenceEngine)
    return engine


def add_config_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Add `--deepspeed` and `--deepspeed_config`, which `initialize(args=...)` reads.

    Args:
        parser: Parser of the training script; it is changed in place.

    Returns:
        `parser`.
    """
    group = parser.add_argument_group("polyaccel")
    group.add_argument(
        "--deepspeed", action="store_true", help="accepted for scripts that pass it; the engine is always on"
    )
    group.add_argument("--deepspeed_config", metavar="FILE", help="the JSON config")
    return parser


def _refuse_foreign(mine: str, foreign: Mapping[str, Any]) -> None:
    """Raise PolyaccelError for an argument of the other framework."""
    given = [name for name, value in foreign.items() if value is not None]
    if given:
        raise PolyaccelError(
            f"initialize was given {', '.join(given)}, which {mine} has no use for", hint=f"leave {given[0]} out"
        )


def _the_config(args: Any, config: Any, config_params: Any) -> Any:
    """The one config among the places where callers put it."""
    from_args = getattr(args, "deepspeed_config", None)
    sources = {"config": config, "config_params": config_params, "args.deepspeed_config": from_args}
    present = {name: source for name, source in sources.items() if source is not None}
    if len(present) != 1:
        what = "no config was given" if not present else "several configs were given"
        raise ConfigError(
            [Problem("config", ", ".join(present) or None, what, f"pass exactly one of {', '.join(sources)}")],
            source="initialize",
        )
    return next(iter(present.values()))


def _load_frontend(home: Literal["torch", "jax"]) -> Any:
    """The module whose `initialize` makes engines for a framework."""
    try:
        return import_module(f"polyaccel.{home}.initialize")
    except ImportError as error:
        if (error.name or "").partition(".")[0] != home:
            raise
        if error.name != home:
            raise PolyaccelError(
                f"this version of {home} is too old: {error}",
                hint=install_line(home).replace("install", "install --upgrade", 1),
                value=home,
            ) from error
        other = ", or pass params= where the model is a function of JAX" if home == "torch" else ""
        raise PolyaccelError(f"{home} is not installed", hint=f"{install_line(home)}{other}", value=home) from error


def _is_of(model: object, packages: frozenset[str]) -> bool:
    """Whether a class that `model` is made of comes from one of `packages`."""
    return any(kind.__module__.partition(".")[0] in packages for kind in type(model).__mro__)
