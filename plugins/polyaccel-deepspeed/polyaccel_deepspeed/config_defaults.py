"""What DeepSpeed takes for arguments of optimizers and schedules that are left out or unknown to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from polyaccel_deepspeed.change import Change, Tree

_TORCH_DECAY = 0.01
"""The `weight_decay` of torch.optim.AdamW."""
_HOST_LION_BETAS = (0.9, 0.999)
"""The `betas` of DeepSpeedCPULion."""


def _warmup_type(tree: Tree) -> Iterator[Change]:
    params = _params(tree, "scheduler")
    if "warmup_type" in params and params["warmup_type"] not in ("log", "linear"):
        yield Change(
            "scheduler.params.warmup_type",
            f'= {params["warmup_type"]!r} is unknown: the warm-up is logarithmic ("log"), as in DeepSpeed; or write '
            '"linear"',
            is_warning=True,
        )
        params["warmup_type"] = "log"


def _adam(tree: Tree) -> Iterator[Change]:
    """DeepSpeed's "AdamW" is decoupled whatever `adam_w_mode` is, and `torch_adam` brings torch's own defaults."""
    params, kind = _params(tree, "optimizer"), _optimizer_of(tree)
    if kind == "adamw" and params.get("adam_w_mode") is False:
        del params["adam_w_mode"]
        yield Change("optimizer.params.adam_w_mode", "= false was dropped: DeepSpeed's AdamW decouples weight decay")
    if kind in ("adam", "adamw") and params.get("torch_adam") is True:
        params.pop("foreach", None)  # a choice of speed
        if "weight_decay" not in params and params.get("adam_w_mode", True) is not False:
            params["weight_decay"] = _TORCH_DECAY
            what = f"is left out, which means {_TORCH_DECAY} to torch.optim.AdamW, which `torch_adam` asks for"
            yield Change("optimizer.params.weight_decay", what, is_warning=True)


def _lion(tree: Tree) -> Iterator[Change]:
    """DeepSpeed's Lion on the host has another default than that on the device."""
    if _optimizer_of(tree) != "lion":
        return
    zero, params = tree.get("zero_optimization"), _params(tree, "optimizer")
    offload = zero.get("offload_optimizer") if isinstance(zero, Mapping) else None
    on_host = isinstance(offload, Mapping) and offload.get("device") in ("cpu", "nvme")
    on_host = on_host or (isinstance(zero, Mapping) and zero.get("cpu_offload") is True)
    if on_host and "betas" not in params and isinstance(tree["optimizer"], dict):
        tree["optimizer"]["params"] = {**params, "betas": list(_HOST_LION_BETAS)}
        yield Change("optimizer.params.betas", f"are left out, which means {_HOST_LION_BETAS} to DeepSpeed's CPU Lion")
    what = "follows the paper where momentum and gradient are both 0: the weight stays. DeepSpeed moves it by lr"
    yield Change("optimizer.type", f'= "Lion" {what}')


def _params(tree: Tree, section: str) -> Tree:
    """The arguments in `tree[section]`, to be changed; an empty dict where there are none."""
    found = tree.get(section)
    params = found.get("params") if isinstance(found, Mapping) else None
    return params if isinstance(params, dict) else {}


def _optimizer_of(tree: Tree) -> str:
    """The optimizer's name in lower case; "" without one."""
    found = tree.get("optimizer")
    return str(found.get("type", "")).lower() if isinstance(found, Mapping) else ""


DEFAULTS_RULES: tuple[Callable[[Tree], Iterator[Change]], ...] = (_warmup_type, _adam, _lion)
