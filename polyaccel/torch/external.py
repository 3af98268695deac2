"""Parameters that a module uses although another one has them, as a user declares it.

Sharded parameters used outside of their module are found and remembered when they are first used; a declaration makes
them part of the first forward too, and is what DeepSpeed's users may have in their models already.
"""

from __future__ import annotations

from torch import nn

from polyaccel.torch.homes import home_of

_EXTERNAL = "_polyaccel_external"


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Gather `parameter` around `module` too. Works before and after `initialize`; repeating it changes nothing."""
    declared: list[nn.Parameter] = module.__dict__.setdefault(_EXTERNAL, [])
    if not any(parameter is other for other in declared):
        declared.append(parameter)
    home = home_of(parameter)
    if home is not None and home.adapter is not None:
        home.adapter.register_external(module, parameter)


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Undo `register_external_parameter`; a parameter that was not declared is passed over."""
    declared = external_parameters(module)
    module.__dict__[_EXTERNAL] = [other for other in declared if other is not parameter]
    home = home_of(parameter)
    if home is not None and home.adapter is not None and len(module.__dict__[_EXTERNAL]) < len(declared):
        home.adapter.unregister_external(module, parameter)


def external_parameters(module: nn.Module) -> list[nn.Parameter]:
    """What was declared for `module`."""
    return list(module.__dict__.get(_EXTERNAL, ()))
