"""`deepspeed.ops.op_builder`: builders that have nothing to build. polyaccel's kernels come with its package."""

from __future__ import annotations

from functools import cache
from typing import Any, ClassVar

from polyaccel.errors import PolyaccelError
from polyaccel_deepspeed.names.surface import BUILDERS


class OpBuilder:
    """A native part of DeepSpeed's, that polyaccel has in its own package or does not need."""

    NAME: ClassVar[str] = ""

    def __init__(self, name: str | None = None) -> None:
        self.name = name or self.NAME

    def is_compatible(self, verbose: bool = False) -> bool:
        """True: there is nothing to build that could fail."""
        return True

    def installed(self) -> bool:
        return True

    def absolute_name(self) -> str:
        return f"deepspeed.ops.{self.NAME}"

    def load(self, verbose: bool = True) -> Any:
        """Raises PolyaccelError: the extension does not exist."""
        raise PolyaccelError(
            f"there is nothing to build or load for {self.NAME}: polyaccel's kernels come with its package",
            hint="use the optimizer or the config key that needs it; it finds its kernels itself",
            value=self.NAME,
        )

    jit_load = load


class _FilesBuilder(OpBuilder):
    """The builder of `deepspeed.ops.aio`."""

    def load(self, verbose: bool = True) -> Any:
        """Return the module that has `aio_handle`."""
        from polyaccel_deepspeed import files

        return files

    jit_load = load


@cache
def builder_class(name: str) -> type[OpBuilder]:
    """The class of a builder. Raises PolyaccelError for a name that DeepSpeed's optimizers and files do not use."""
    if name not in BUILDERS:
        raise PolyaccelError(f"polyaccel has no {name}", hint=f"there are {', '.join(BUILDERS)}", value=name)
    base = _FilesBuilder if name == "AsyncIOBuilder" else OpBuilder
    return type(name, (base,), {"NAME": BUILDERS[name], "__module__": __name__})


COMPATIBLE_OPS = dict.fromkeys(BUILDERS.values(), True)
"""`deepspeed.ops.__compatible_ops__`, which scripts ask before they use an op."""


def __getattr__(name: str) -> type[OpBuilder]:
    if name in BUILDERS:
        return builder_class(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
