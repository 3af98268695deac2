"""The section `jax`, polyaccel's own: how a JAX function runs."""

from __future__ import annotations

from typing import Literal

from polyaccel.config.section import Section


class JaxConfig(Section):
    """polyaccel's own section: how a JAX function runs. Modules of torch do not ask it."""

    execution: Literal["views", "native"] = "views"
    """Who exchanges and updates: "views", the engine on its own memory, which JAX sees; "native", JAX itself, in one
    program over all its devices, several a process too. Parameters are whole on every device: stages 0 to 2."""
