"""Modules of DeepSpeed that cannot be imported here, and why: package by package."""

from __future__ import annotations

from polyaccel_deepspeed import to_come
from polyaccel_deepspeed.names.entry import Name, Status

_NEVER = {
    "deepspeed.autotuning": "`deepspeed --autotuning` and `polyaccel tune` search settings",
    "deepspeed.checkpoint": "polyaccel's checkpoints resume at any number of ranks; `polyaccel ckpt` converts",
    "deepspeed.comm": "backends are plugins; deepspeed.comm has the functions",
    "deepspeed.compat": "a shim for versions of torch",
    "deepspeed.compile": "DeepCompile; engine.compile is torch.compile",
    "deepspeed.constants": "DeepSpeed's own constants",
    "deepspeed.datastates": "checkpoints are saved in the background by checkpoint.async",
    "deepspeed.git_version_info": "deepspeed.__version__ names both versions",
    "deepspeed.git_version_info_installed": "deepspeed.__version__ names both versions",
    "deepspeed.inference": "deepspeed.init_inference serves a model of the user's; there are no kernels of FastGen",
    "deepspeed.io": "storages are plugins, and write files by their own threads",
    "deepspeed.launcher": "a part of DeepSpeed's launcher; the command `deepspeed` starts ranks",
    "deepspeed.linear": "deepspeed.linear has the layers",
    "deepspeed.model_implementations": "models of transformers and diffusers run as they are",
    "deepspeed.module_inject": "models are cut by tensor_parallel and expert_parallel in the config",
    "deepspeed.moe": "deepspeed.moe.layer.MoE and expert_parallel have the layers",
    "deepspeed.monitor": "deepspeed.monitor.monitor.MonitorMaster writes to every monitor of the config",
    "deepspeed.nvme": "the commands ds_io and ds_nvme_tune measure files",
    "deepspeed.ops.random_ltd": "kernels of dropped tokens; data_efficiency.data_routing.random_ltd drops them",
    "deepspeed.ops": "kernels are a table with implementations per device; nothing is built",
    "deepspeed.profiling": "deepspeed.profiling.flops_profiler has the functions",
    "deepspeed.runtime": "a part of DeepSpeed's engine without a counterpart",
    "deepspeed.runtime.checkpoint_engine": "storages are plugins: checkpoint.storage names one",
    "deepspeed.runtime.data_pipeline": "polyaccel.data has the analysis, and data_efficiency the rest",
    "deepspeed.runtime.domino": "tensor ranks cut a model's own layers",
    "deepspeed.runtime.pipe": "deepspeed.pipe has the module; schedules are pipeline.schedule",
    "deepspeed.runtime.rollout": "engine.generate decodes as many sequences at a time as batch_size says",
    "deepspeed.runtime.swap_tensor": "offload_optimizer and offload_param with the device nvme",
    "deepspeed.runtime.tensor_parallel": "tensor_parallel in the config, or deepspeed.tp_model_init",
    "deepspeed.runtime.weight_quantizer": 'init_inference(dtype="int8") holds weights in few bits',
    "deepspeed.runtime.zero.muon": 'pieces of the update; MuonWithAuxAdam and the config\'s "Muon" train by it',
    "deepspeed.runtime.zero": "pieces of DeepSpeed's stages; deepspeed.zero has what scripts use",
    "deepspeed.sequence": "sequence_parallel_size cuts sequences; tiled_compute tiles losses",
    "deepspeed.utils": "a helper of DeepSpeed's own",
}
"""The reason for each package; the longest prefix counts."""
_ABSENT = {
    "deepspeed.runtime.superoffload": to_come.SUPER_OFFLOAD,
    "deepspeed.runtime.zenflow": to_come.ZENFLOW,
}
"""Packages whose feature is not here. This list only shrinks."""

ABSENT_MODULES = {prefix: Name(Status.NO, why=why) for prefix, why in _NEVER.items()} | {
    prefix: Name(Status.NO, why=why) for prefix, why in _ABSENT.items()
}


def absent_module(module: str) -> Name | None:
    """Return what stands for a module of DeepSpeed that is not in the table of names; None for an unknown one."""
    parts = module.split(".")
    prefixes = (".".join(parts[:length]) for length in range(len(parts), 1, -1))
    return next((ABSENT_MODULES[one] for one in prefixes if one in ABSENT_MODULES), None)
