"""Keys of DeepSpeed whose effect polyaccel has under another key."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from polyaccel.config.keys import parent_of, value_of
from polyaccel.config.sections.zero import ZeroConfig
from polyaccel_deepspeed.change import Change, Tree
from polyaccel_deepspeed.keys.settled import WRITER

_BUCKET = ZeroConfig.model_fields["reduce_bucket_size"].default
_AS_THEY_ARE = ("fp16_mixed_quantize", "quantize_verbose", "quantizer_kernel")
UNMANAGED = "managed_gradient_accumulation"


def _nested_tensors(tree: Tree) -> Iterator[Change]:
    """`tensor_parallel.tensor_parallel` is `tensor_parallel.tp` by the name of DeepSpeed's field."""
    section = tree.get("tensor_parallel")
    if isinstance(section, dict) and isinstance(section.get("tensor_parallel"), Mapping):
        inner = section.pop("tensor_parallel")
        section["tp"] = {**inner, **section.get("tp", {})}
        yield Change("tensor_parallel.tensor_parallel", "was read as tensor_parallel.tp")


def _allgather_size(tree: Tree) -> Iterator[Change]:
    """`"zero_optimization": true` had its bucket size next to it."""
    if isinstance(tree.get("zero_optimization"), bool) and "allgather_size" in tree:
        size = tree.pop("allgather_size")
        tree["zero_optimization"] = {"stage": int(tree["zero_optimization"]), "allgather_bucket_size": size}
        yield Change("allgather_size", f"= {size!r} was read as zero_optimization.allgather_bucket_size")


def _sequence_gradients(tree: Tree) -> Iterator[Change]:
    """DeepSpeed adds gradients up in this type where ranks share sequences; it is float32 if left out."""
    key = "seq_parallel_communication_data_type"
    size = value_of(tree, "sequence_parallel_size") or value_of(tree, "mesh.sequence") or 1
    written = tree.pop(key, None)
    if size != 1 and (written is not None or tree.get("communication_data_type") not in (None, "fp32")):
        read = str(written or "fp32").lower()
        tree["communication_data_type"] = read
        yield Change(key, f"= {written!r} was read as communication_data_type = {read!r}, for ranks share sequences")
    elif written is not None:
        yield Change(key, f"= {written!r} has no effect: no ranks share sequences")


def _sub_groups(tree: Tree) -> Iterator[Change]:
    """A host updates a bucket at a time, so its buckets are the tiles."""
    zero = tree.get("zero_optimization")
    if not isinstance(zero, dict) or value_of(tree, "zero_optimization.offload_optimizer.device") in (None, "none"):
        return
    size, bucket = zero.get("sub_group_size"), zero.get("reduce_bucket_size", _BUCKET)
    if isinstance(size, int | float) and isinstance(bucket, int | float) and 1 <= size < bucket:
        zero["reduce_bucket_size"] = int(zero.pop("sub_group_size"))
        said = f"= {size!r} was read as reduce_bucket_size: the host updates a bucket at a time"
        yield Change("zero_optimization.sub_group_size", said)


def _mics(tree: Tree) -> Iterator[Change]:
    """MiCS kept parameters within so many ranks, as second shards do, and copies of optimizer states in each group."""
    zero = tree.get("zero_optimization")
    if not isinstance(zero, dict):
        return
    if isinstance(zero.get("mics_hierarchical_params_gather"), bool):
        del zero["mics_hierarchical_params_gather"]
        yield Change("zero_optimization.mics_hierarchical_params_gather", "has no effect: gathers are by host")
    size = zero.get("mics_shard_size")
    if type(size) is not int or (size > 0 and zero.get("zero_hpz_partition_size", size) != size):
        return
    del zero["mics_shard_size"]
    said = "was dropped: it is off"
    if size > 0:
        zero["zero_hpz_partition_size"] = size
        said = f"= {size} was read as zero_hpz_partition_size; optimizer states are sharded over all ranks"
    yield Change("zero_optimization.mics_shard_size", said)


def _local_storage(tree: Tree) -> Iterator[Change]:
    table, name = parent_of(tree, "checkpoint.use_node_local_storage")
    if table.pop(name, None) is True and "storage" not in table:
        table["storage"] = "node_local"
        yield Change(f"checkpoint.{name}", '= True was read as checkpoint.storage = "node_local"')


def _writer(tree: Tree) -> Iterator[Change]:
    """DeepSpeed's fast writer: `decoupled` saves while training continues, and the rest is speed."""
    table, name = parent_of(tree, "checkpoint.writer")
    writer = table.get(name)
    if name not in table or not (writer is None or isinstance(writer, Mapping)):
        return
    del table[name]
    left = {key: value for key, value in (writer or {}).items() if key not in WRITER}
    if left:
        table[name] = left  # for polyaccel to refuse by name
    if writer:
        table.setdefault("async", writer.get("decoupled") is True)
        said = f"was read as checkpoint.async = {table['async']}; its options have no effect"
        yield Change("checkpoint.writer", said)


def _sparse_attention(tree: Tree) -> Iterator[Change]:
    """Layers of the model read this section, and the engine does not."""
    section = tree.get("sparse_attention")
    if isinstance(section, Mapping) and section:
        from polyaccel_deepspeed.sparse_attention import pattern_of  # torch is loaded where it is needed

        pattern_of(dict(section))
        del tree["sparse_attention"]
        yield Change("sparse_attention", "fits; the layers of the model read it")


def _datastates(tree: Tree) -> Iterator[Change]:
    """DataStates writes checkpoints in the background."""
    if "datastates_ckpt" not in tree:
        return
    written = tree.pop("datastates_ckpt")
    if written not in (False, None):
        yield from _background(tree, "datastates_ckpt")


def _nebula(tree: Tree) -> Iterator[Change]:
    """Nebula wrote checkpoints in the background and kept the newest."""
    section = tree.get("nebula")
    if not isinstance(section, Mapping) or section.get("enabled") is not True:
        return
    del tree["nebula"]
    yield from _background(tree, "nebula")
    count = section.get("num_of_version_in_retention")
    if isinstance(count, int) and count > 0:
        tree["checkpoint"].setdefault("keep_last", count)


def _background(tree: Tree, key: str) -> Iterator[Change]:
    saves = tree.setdefault("checkpoint", {})
    if isinstance(saves, dict):
        saves.setdefault("async", True)
        yield Change(key, f"was read as checkpoint.async = {saves['async']}; its options have no effect", True)


def _amp(tree: Tree) -> Iterator[Change]:
    """Apex's levels: O1 casts operations, O2 keeps master weights of a model in half precision."""
    section = tree.get("amp")
    if not isinstance(section, Mapping) or section.get("enabled") is not True:
        return
    level, scale = section.get("opt_level", "O1"), section.get("loss_scale", "dynamic")
    if level not in ("O0", "O1", "O2"):
        return  # refused with the removed keys
    del tree["amp"]
    if level == "O0":
        yield Change("amp", '= "O0" was dropped: it trains in float32', True)
        return
    fp16: dict[str, Any] = {} if scale == "dynamic" else {"loss_scale": float(scale)}
    if level == "O1":
        tree["torch_autocast"] = {"enabled": True, "dtype": "float16"}
    else:
        fp16["enabled"] = True
    if fp16:
        tree["fp16"] = {**tree.get("fp16", {}), **fp16}
    instead = "torch_autocast in float16" if level == "O1" else "fp16"
    yield Change("amp", f"= {level!r} was read as {instead}, with a loss scale", True)


def _unmanaged(tree: Tree) -> Iterator[Change]:
    """`initialize` passes it to the engine. Micro-batches that are not counted are added up in float32."""
    if isinstance(tree.get(UNMANAGED), bool) and tree.pop(UNMANAGED) is False:
        types = tree.setdefault("data_types", {})
        if isinstance(types, dict):
            types.setdefault("grad_accum_dtype", "fp32")
        yield Change(UNMANAGED, "= False leaves it to the script where an accumulation ends: at each engine.step()")


def _strict_specs(tree: Tree) -> Iterator[Change]:
    """Keys of layer specs that the model decides are taken out again in `initialize`."""
    table, name = parent_of(tree, "tensor_parallel.partition_config.strict_mode")
    if name in table:
        table.pop(name)
    specs = value_of(tree, "tensor_parallel.partition_config.layer_specs")
    for index, spec in enumerate(specs if isinstance(specs, list) else ()):
        if isinstance(spec, dict) and spec.pop("model_types", None):
            key = f"tensor_parallel.partition_config.layer_specs[{index}].model_types"
            yield Change(key, "is compared with the model's type in deepspeed.initialize")


def _mixture_of_quantisation(tree: Tree) -> Iterator[Change]:
    """MoQ, as of DeepSpeed 0.3.16 to 0.5: weights that lose a bit after 1, 2, 4, 8 periods.

    Its eigenvalues become the section `eigenvalue`; `quantize_eigenvalue` switches them on too.
    """
    key, section = "quantize_training", tree.get("quantize_training")
    if not isinstance(section, dict):
        return
    eigenvalues = {name: section.pop(name) for name in ("eigenvalue", "quantize_eigenvalue") if name in section}
    del tree[key]
    if not (enabled := section.pop("enabled", False)):
        tree.pop(key, None)
        yield Change(key, "was dropped: it is off")
        return
    algorithm = section.pop("quantize_algo", section.pop("quantize-algo", {}))
    bits, schedule = ({**section.pop(name, {})} for name in ("quantize_bits", "quantize_schedule"))
    shared = {
        "enabled": enabled,  # the core reads or refuses what is neither true nor false
        "schedule_offset": schedule.pop("schedule_offset", 100),
        "quantize_groups": section.pop("quantize_groups", 1),
        "quantization_type": algorithm.get("q_type", section.pop("quantize_type", "symmetric")),
        "rounding": algorithm.get("rounding", "nearest"),
        **{name: section.pop(name) for name in _AS_THEY_ARE if name in section},
        **section,  # the rest is unknown, and refused as such
    }
    params = {
        "start_bits": bits.pop("start_bits", 16),
        "target_bits": bits.pop("target_bits", 16),
        "quantization_period": schedule.pop("quantize_period", 100),
        "period_doubling": True,
        **bits,
        **schedule,
    }
    compression = tree.setdefault("compression_training", {})
    if isinstance(compression, dict) and "weight_quantization" not in compression:
        groups = {"quantize_training": {"params": params, "modules": ["*"]}}
        compression["weight_quantization"] = {"shared_parameters": shared, "different_groups": groups}
        yield Change(key, "was read as compression_training.weight_quantization with period_doubling")
        if any(_is_on(value) for value in eigenvalues.values()):
            given = eigenvalues.get("eigenvalue")
            tree.setdefault("eigenvalue", {**(given if isinstance(given, dict) else {}), "enabled": True})
            yield Change(f"{key}.eigenvalue", "was read as the section eigenvalue")
    else:
        tree[key] = {"enabled": enabled, **section}  # both cannot be


def _is_on(value: Any) -> bool:
    return bool(value.get("enabled", False)) if isinstance(value, Mapping) else bool(value)


def _compression(tree: Tree) -> Iterator[Change]:
    """Techniques that are off may have values for which there is nothing: DeepSpeed does not read them."""
    section = tree.get("compression_training")
    if not isinstance(section, dict):
        return
    for name, technique in list(section.items()):
        table = technique if name == "layer_reduction" else value_of(technique, "shared_parameters")
        if isinstance(technique, Mapping) and not (isinstance(table, Mapping) and table.get("enabled", False)):
            del section[name]
            yield Change(f"compression_training.{name}", "was dropped: it is off")


TRANSLATIONS: tuple[Callable[[Tree], Iterator[Change]], ...] = (
    _nested_tensors,
    _allgather_size,
    _sequence_gradients,
    _sub_groups,
    _mics,
    _local_storage,
    _writer,
    _datastates,
    _sparse_attention,
    _nebula,
    _amp,
    _unmanaged,
    _strict_specs,
    _mixture_of_quantisation,
    _compression,
)
"""In their order. Each removes its keys from the tree."""
