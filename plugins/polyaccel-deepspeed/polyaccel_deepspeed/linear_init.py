"""`deepspeed.linear.Init`: models whose linear layers get frozen weights and adapters while they are built.

[Note: Layers inside linear.Init]
DeepSpeed replaces `torch.nn.Linear` and two functions of transformers. Layers that a script builds inside the context
are `OptimizedLinear` here too, under a class of which plain linear layers are instances and which may be subclassed.
Models of transformers are built and loaded with plain layers. Then those that `target_mods` names are exchanged, one
after the other: transformers 5 loads weights past `load_state_dict`, by which DeepSpeed sees names.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from logging import getLogger
from types import TracebackType
from typing import Any

import torch
from torch import nn

from polyaccel.errors import PolyaccelError
from polyaccel.torch.deferred_init.values import value_of
from polyaccel_deepspeed.linear import LoRAConfig, LoRAOptimizedLinear, OptimizedLinear, QuantizationConfig

log = getLogger("polyaccel.deepspeed")
_LOADERS = ("from_pretrained", "from_config")


class Init:
    """A context in which linear layers are `OptimizedLinear`.

    Layers that are built inside have no adapters before `init_lora(model)`. Models of `AutoModelForCausalLM` have:
    their layers in `target_mods` get them, and all else is frozen.
    """

    def __init__(self, lora_config: LoRAConfig | None = None, quant_config: QuantizationConfig | None = None) -> None:
        self.lora_config, self.quant_config = lora_config, quant_config
        self._own: list[tuple[Any, str, Any]] = []
        self._is_complete = False

    def __enter__(self) -> Init:
        """Replace what builds layers. Raises PolyaccelError inside of another one."""
        if isinstance(nn.Linear, _LinearType):
            raise PolyaccelError("deepspeed.linear.Init was entered twice", hint="leave the outer one first")
        self._own = [(nn, "Linear", nn.Linear)]
        transformers: Any = sys.modules.get("transformers") or _import_transformers()
        plain = nn.Linear
        nn.Linear = _linear_class(plain, self)  # type: ignore[misc]  # for the time of the context
        if transformers is not None:
            auto = transformers.AutoModelForCausalLM
            for name in _LOADERS:
                self._own.append((auto, name, auto.__dict__.get(name)))
                setattr(auto, name, partial(self._built, getattr(auto, name), plain))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Put back what was replaced."""
        for owner, name, value in reversed(self._own):
            delattr(owner, name) if value is None else setattr(owner, name, value)
        self._own = []
        if self.lora_config is not None and not self._is_complete and error is None:
            log.warning("layers of deepspeed.linear.Init have no adapters yet: call deepspeed.linear.init_lora(model)")

    def _built(self, build: Any, plain: Any, *arguments: Any, **named: Any) -> nn.Module:
        replaced, nn.Linear = nn.Linear, plain  # type: ignore[misc]  # modules that are imported now keep theirs
        try:
            model: nn.Module = build(*arguments, **named)
            if self.lora_config is not None:
                _exchange(model, self.lora_config, self.quant_config)
                self._is_complete = True
            return model
        finally:
            nn.Linear = replaced  # type: ignore[misc]  # see above

    def make(self, plain: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> nn.Module:
        """Return the layer for a call of `nn.Linear`: with adapters in bfloat16 as there, else in torch's type."""
        lora = None if self.lora_config is None else replace(self.lora_config, delay_lora_init=True)
        named = {"bias": True, **named, "linear_cls": plain}
        named["dtype"] = named.get("dtype") or (torch.get_default_dtype() if lora is None else torch.bfloat16)
        for old, new in (("in_features", "input_dim"), ("out_features", "output_dim")):
            if old in named:
                named[new] = named.pop(old)
        return OptimizedLinear(*arguments, **{**named, "lora_config": lora, "quantization_config": self.quant_config})


class _LinearType(type):
    """The class of what stands for `nn.Linear` meanwhile."""

    plain: Any

    def __instancecheck__(cls, one: Any) -> bool:
        return isinstance(one, cls.plain)

    def __subclasscheck__(cls, one: type) -> bool:
        return issubclass(one, cls.plain)


def _linear_class(plain: Any, context: Init) -> Any:
    def make(cls: Any, *arguments: Any, **named: Any) -> Any:
        return context.make(plain, arguments, named) if cls is made else plain.__new__(cls)

    made: Any = _LinearType("Linear", (plain,), {"__new__": make, "plain": plain})
    return made


def _exchange(model: nn.Module, lora: LoRAConfig, quantization: QuantizationConfig | None) -> None:
    """Freeze `model`, and give its linear layers in `target_mods` adapters."""
    model.requires_grad_(False)
    found = {
        name: part
        for name, part in model.named_modules()
        if type(part) is nn.Linear and any(target in f"{name}." for target in lora.target_mods)
    }
    if not found:
        hint = "name parts of its linear layers in target_mods"
        raise PolyaccelError(f"no layer of {type(model).__name__} is in target_mods", hint=hint, value=lora.target_mods)
    for name, part in found.items():
        made = LoRAOptimizedLinear.from_linear(part, value_of(part.weight).detach(), lora, quantization)
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, made.train(part.training))


def _import_transformers() -> Any:
    try:
        import transformers  # slow, and not everyone has it
    except ImportError:
        return None
    return transformers
