"""Problems of keys that are right one by one: contradictions, and names of plugins that are not installed."""

from __future__ import annotations

from polyaccel.config.root import Config
from polyaccel.config.sections.offload import BUILT_IN_DEVICES
from polyaccel.config.sections.zero import ZeroConfig
from polyaccel.errors import PolyaccelError, Problem
from polyaccel.registry import PluginGroup, find_plugin


def conflict_problems(config: Config) -> list[Problem]:
    """A problem for every contradiction between two keys of `config`; a section that is off contradicts nothing."""
    problems = [*_precision(config), *_gradients(config), *_travel(config), *_offload(config)]
    problems += _replica_groups(config)
    problems += [*_elasticity(config), *_recomputation(config), *_shared_tokens(config)]
    return [*problems, *_generation(config), *_monitors(config)]


def plugin_problems(config: Config) -> list[Problem]:
    """A problem for every name in `config` that no installed storage, monitor or tier has."""
    zero = config.zero_optimization
    named = [("checkpoint.storage", PluginGroup.STORAGE, config.checkpoint.storage_plugin[0])]
    named += [(f"monitors.{name}", PluginGroup.MONITORS, name) for name in config.monitors]
    named += [
        (f"zero_optimization.{key}.device", PluginGroup.TIERS, section.device)
        for key, section in (("offload_optimizer", zero.offload_optimizer), ("offload_param", zero.offload_param))
        if section.device not in BUILT_IN_DEVICES
    ]
    problems = []
    for key, group, name in named:
        try:
            find_plugin(group, name)
        except PolyaccelError as error:
            problems.append(Problem(key, name, error.message, error.hint))
    return problems


def _precision(config: Config) -> list[Problem]:
    problems = []
    modes = {"fp16": config.fp16.enabled, "bf16": config.bf16.enabled, "torch_autocast": config.torch_autocast.enabled}
    if len(on := [name for name, enabled in modes.items() if enabled]) > 1:
        others = " and ".join(f"{name}.enabled" for name in on[:-1])
        problems.append(Problem(f"{on[-1]}.enabled", True, f"excludes {others}, which is true too", "enable one"))
    implied = next((name for name in on if name != "torch_autocast"), "fp32")
    stated = config.data_types.param_dtype
    if stated is not None and stated != implied:
        expected = f"should be {implied!r}: fp16.enabled = {config.fp16.enabled}, bf16.enabled = {config.bf16.enabled}"
        problems.append(Problem("data_types.param_dtype", stated, expected, "leave it out"))
    fp16 = config.fp16
    if fp16.enabled and not fp16.loss_scale and fp16.min_loss_scale > 2.0**fp16.initial_scale_power:
        expected = f"is above the initial scale 2 ** {fp16.initial_scale_power}"
        problems.append(Problem("fp16.min_loss_scale", fp16.min_loss_scale, expected, "raise initial_scale_power"))
    return problems


def _gradients(config: Config) -> list[Problem]:
    problems = []
    factor = config.gradient_predivide_factor
    if config.prescale_gradients and factor != 1.0:
        expected = "has no effect when prescale_gradients divides by the number of ranks first"
        problems.append(Problem("gradient_predivide_factor", factor, expected, "use one of the two"))
    if config.gradient_allreduce_op == "sum" and (config.prescale_gradients or factor != 1.0):
        scaling = "prescale_gradients" if config.prescale_gradients else f"gradient_predivide_factor = {factor}"
        expected = f"divides nothing, but {scaling} asks for a division"
        problems.append(Problem("gradient_allreduce_op", "sum", expected, 'use "mean" or leave the other out'))
    if config.gradient_clipping > 0 and not config.zero_optimization.compute_grad_norm:
        expected = f"is needed for gradient_clipping = {config.gradient_clipping}"
        problems.append(Problem("zero_optimization.compute_grad_norm", False, expected, "leave it true"))
    return problems


def _replica_groups(config: Config) -> list[Problem]:
    """Groups that train apart are data-parallel, and exchange what rests in memory."""
    section, zero = config.diloco, config.zero_optimization
    if section is None:
        return []
    leave = "leave it out"
    wrong = [
        (zero.stage == 0, "zero_optimization.stage", 0, "would send each byte once a rank", "use 1, the same numbers"),
        (config.checkpoint.in_memory_section is not None, "checkpoint.in_memory", True, "has no outer steps", leave),
        (config.elasticity.enabled, "elasticity.enabled", True, "does not know replica groups", leave),
        *(
            (getattr(config.mesh, axis) > 1, config.mesh_key(axis), getattr(config.mesh, axis), "is not in them", leave)
            for axis in ("pipe", "sequence", "tensor", "expert")
        ),
        *(
            (
                part.device not in ("none", "cpu"),
                f"zero_optimization.{key}.device",
                part.device,
                "is not in memory",
                leave,
            )
            for key, part in (("offload_optimizer", zero.offload_optimizer), ("offload_param", zero.offload_param))
        ),
    ]
    problems = [
        Problem(key, value, f"{what} of replica groups (diloco)", hint) for on, key, value, what, hint in wrong if on
    ]
    every, delay = section.sync_every, section.fragment_sync_delay
    if section.fragments > every:
        expected = f"should be at most diloco.sync_every = {every}"
        problems.append(Problem("diloco.fragments", section.fragments, expected))
    if delay >= every:
        expected = f"should be below diloco.sync_every = {every}"
        problems.append(Problem("diloco.fragment_sync_delay", delay, expected))
    if section.fragment_update_alpha and not delay:
        expected = "mixes what was learned during an exchange, and diloco.fragment_sync_delay = 0"
        problems.append(Problem("diloco.fragment_update_alpha", section.fragment_update_alpha, expected))
    return problems


def _travel(config: Config) -> list[Problem]:
    """ZeRO++ is about sharded parameters, in equal parts."""
    zero = config.zero_optimization
    given = {
        name: value
        for name, field in ZeroConfig.model_fields.items()
        if name.startswith(("zero_quantized", "zero_hpz", "zeropp")) and (value := getattr(zero, name)) != field.default
    }
    if given and config.mesh.capacity is not None:
        expected = f"gives ranks unequal parts, and zero_optimization.{next(iter(given))} needs equal ones"
        return [Problem("mesh.capacity", list(config.mesh.capacity), expected, "use one of the two")]
    if zero.zeropp_loco_param is not None and not zero.zero_quantized_gradients:
        key, hint = "zero_optimization.zeropp_loco_param", "set zero_optimization.zero_quantized_gradients"
        return [Problem(key, True, "is about gradients in codes, and they are not", hint)]
    if zero.zeropp_loco_param is not None and config.checkpoint.in_memory_section is not None:
        expected = "saves after each step, when errors of zero_optimization.zeropp_loco_param begin at zero"
        return [Problem("checkpoint.in_memory", True, expected, "use one of the two")]
    return [
        Problem(f"zero_optimization.{name}", value, f"is for stage 3, not {zero.stage}", 'use "stage": 3')
        for name, value in given.items()
        if zero.stage != 3
    ]


def _offload(config: Config) -> list[Problem]:
    problems = []
    zero = config.zero_optimization
    for name, section in (("offload_optimizer", zero.offload_optimizer), ("offload_param", zero.offload_param)):
        if section.device == "nvme" and not section.nvme_path:
            expected, hint = f'is needed for {name}.device = "nvme"', "name a directory on a fast local disk"
            problems.append(Problem(f"zero_optimization.{name}.nvme_path", section.nvme_path, expected, hint))
        if section.tier_options and section.device in BUILT_IN_DEVICES:
            expected, hint = f"are for a plugin, and device is {section.device!r}", "leave them out"
            problems.append(
                Problem(f"zero_optimization.{name}.tier_options", dict(section.tier_options), expected, hint)
            )
    device = zero.offload_param.device
    if device != "none" and zero.stage != 3:
        expected = f"is for sharded parameters; at stage {zero.stage} every rank computes with all of them in place"
        problems.append(
            Problem("zero_optimization.offload_param.device", device, expected, 'use "stage": 3, or "none"')
        )
    return problems


def _elasticity(config: Config) -> list[Problem]:
    section = config.elasticity
    if not section.enabled or section.model_parallel_size == 1:
        return []
    expected, hint = "is for models that are cut over ranks, which cannot be trained here", "use 1"
    return [Problem("elasticity.model_parallel_size", section.model_parallel_size, expected, hint)]


def _recomputation(config: Config) -> list[Problem]:
    section, key = config.activation_checkpointing, "activation_checkpointing"
    problems = []
    for name in ("blocks", "keep", "use_reentrant"):
        value = getattr(section, name)
        if value and not section.recomputes_blocks:
            expected = "is about blocks that are recomputed, and none is"
            problems.append(Problem(f"{key}.{name}", value, expected, 'add "enabled": true'))
    if section.use_reentrant and section.keep:
        expected = f"cannot keep single results, and {key}.keep = {list(section.keep)}"
        problems.append(Problem(f"{key}.use_reentrant", True, expected, "leave one of them out"))
    if section.contiguous_memory_optimization and section.number_checkpoints is None:
        expected = "is needed to allocate for contiguous_memory_optimization"
        problems.append(Problem(f"{key}.number_checkpoints", None, expected, "state the number of regions"))
    return problems


def _shared_tokens(config: Config) -> list[Problem]:
    if not config.tensor_parallel.sequence_sharded:
        return []
    key, tiles, problems = "tensor_parallel.sequence_sharded", config.tiled_compute, []
    if tiles.enabled and tiles.mlp:
        expected = "has tokens gathered where feed-forward layers begin, which tiles would do one by one"
        problems.append(Problem(key, True, expected, 'leave it out, or add "tiled_compute": {"mlp": false}'))
    if config.activation_checkpointing.partition_activations:
        expected = (
            "has cut the inputs of blocks already, which activation_checkpointing.partition_activations would cut"
        )
        problems.append(Problem(key, True, expected, "leave partition_activations out"))
    return problems


def _generation(config: Config) -> list[Problem]:
    section, mesh, problems = config.hybrid_engine, config.mesh, []
    if section.enabled and section.inference_tp_size not in (1, mesh.tensor):
        expected = f"should be 1, or {config.mesh_key('tensor')} = {mesh.tensor}: the ranks that train generate"
        hint = 'set "mesh": {"tensor": N} to cut the weights'
        problems.append(Problem("hybrid_engine.inference_tp_size", section.inference_tp_size, expected, hint))
    if config.generation.exact:
        key = "generation.exact"
        for axis, size in (("sequence", mesh.sequence), ("pipe", mesh.pipe)):
            if size != 1:
                expected = f"needs whole sequences on a rank, which {config.mesh_key(axis)} = {size} cuts"
                problems.append(Problem(key, True, expected, "leave it out, or cut by tensor and data ranks"))
    return problems


def _monitors(config: Config) -> list[Problem]:
    return [
        Problem(f"{key}.enabled", True, f"asks for the monitor that monitors.{section.plugin} asks for", "keep one")
        for key, section in config.monitor_sections.items()
        if section.plugin in config.monitors
    ]
