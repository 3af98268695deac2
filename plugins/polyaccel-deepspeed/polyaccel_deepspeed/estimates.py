"""Estimates of memory for parameters, gradients and Adam's states, by the bytes of ZeRO's paper (section 3.1).

In half precision: 2 bytes a parameter, 2 for its gradient, and 12 for the master weight and two states; DeepSpeed keeps
a gradient in float32 too. `polyaccel plan` counts the buffers of a config, and activations.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from torch import nn

_PARAM, _STATES, _MASTER = 2, 16, 4
"""Bytes a parameter: in 16 bits; its gradients, master weight and states; its value in float32."""


def _sizes(model: nn.Module) -> tuple[int, int]:
    """Parameters of a model, shared ones once, and of its largest layer."""
    layers = (sum(one.numel() for one in layer.parameters(recurse=False)) for layer in model.modules())
    return sum(one.numel() for one in model.parameters()), max(layers)


def estimate_zero2_model_states_mem_needs(
    total_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int]:
    """Bytes of a host and of a GPU at stage 2."""
    gpus = num_gpus_per_node * num_nodes
    if cpu_offload:
        host = total_params * max(_MASTER * gpus, _STATES) * additional_buffer_factor
        return int(host), _PARAM * total_params
    host = total_params * _MASTER * num_gpus_per_node * additional_buffer_factor
    return int(host), _PARAM * total_params + int((_STATES + _PARAM) * total_params / gpus)


def estimate_zero3_model_states_mem_needs(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    cpu_offload_params: bool = True,
    zero_init: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int, int]:
    """Bytes of a host and of a GPU at stage 3, and those of the largest layer."""
    gpus, layer = num_gpus_per_node * num_nodes, 2 * _PARAM * largest_layer_params
    whole = _MASTER * num_gpus_per_node  # of ranks that build the model in float32
    if not cpu_offload:
        built = largest_layer_params if zero_init else total_params
        gpu = layer + int((_STATES + _PARAM) * total_params / gpus)
        return int(built * whole * additional_buffer_factor), gpu, layer
    shard = (_STATES + (_PARAM if cpu_offload_params else 0)) / num_nodes
    host = total_params * (shard if zero_init else max(whole, shard)) * additional_buffer_factor
    return int(host), layer + (0 if cpu_offload_params else int(_PARAM * total_params / gpus)), layer


def estimate_zero2_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print the estimates of stage 2 for a model."""
    rest = (num_gpus_per_node, num_nodes, additional_buffer_factor)
    estimate_zero2_model_states_mem_needs_all_cold(_sizes(model)[0], *rest)


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: int, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print the estimates of stage 2 for a number of parameters."""
    rows = [
        (
            estimate_zero2_model_states_mem_needs(
                total_params, num_gpus_per_node, num_nodes, cpu_offload, additional_buffer_factor
            ),
            f"offload_optimizer={'cpu' if cpu_offload else 'none'}",
        )
        for cpu_offload in (True, False)
    ]
    _tell(f"{total_params:,} parameters", num_gpus_per_node, num_nodes, rows)


def estimate_zero3_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print the estimates of stage 3 for a model."""
    total, largest = _sizes(model)
    rest = (num_gpus_per_node, num_nodes, additional_buffer_factor)
    estimate_zero3_model_states_mem_needs_all_cold(total, largest, *rest)


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """Print the estimates of stage 3 for numbers of parameters."""

    def rows() -> Iterator[tuple[tuple[int, int], str]]:
        for states, params, init in product((True, False), repeat=3):
            if params and not states:
                continue
            host, gpu, _ = estimate_zero3_model_states_mem_needs(
                *(total_params, largest_layer_params, num_gpus_per_node, num_nodes, states, params, init),
                additional_buffer_factor,
            )
            places = ("cpu" if params else "none", "cpu" if states else "none")
            yield (host, gpu), f"offload_param={places[0]}, offload_optimizer={places[1]}, zero_init={int(init)}"

    what = f"{total_params:,} parameters, {largest_layer_params:,} of them in the largest layer"
    _tell(what, num_gpus_per_node, num_nodes, list(rows()))


def _tell(what: str, gpus: int, nodes: int, rows: list[tuple[tuple[int, int], str]]) -> None:
    print(f"Memory for parameters, gradients and Adam's states of {what}, on {nodes} x {gpus} GPUs:")
    print("    per host |     per GPU | options")
    for (host, gpu), options in rows:
        print(f"{host / 2**30:8.2f} GiB | {gpu / 2**30:7.2f} GiB | {options}")
