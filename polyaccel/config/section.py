"""The base of every config section: a frozen pydantic model that converts no value into one of another type."""

from __future__ import annotations

import re
from typing import Annotated, Any, NoReturn, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema


class Section(BaseModel):
    """Base of all sections. Strict: `"2"` and `true` are not numbers; `2` is a fine float and `5e8` a fine integer."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        populate_by_name=True,
        use_attribute_docstrings=True,
        protected_namespaces=(),
    )


class FrozenTable(dict[str, Any]):
    """A dict that refuses to change: a free table inside a frozen config. Pickles and serialises like a dict."""

    def _refuse(self, *args: object, **kwargs: object) -> NoReturn:
        raise TypeError("a config is frozen; make a new one with other values")

    __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse

    def __reduce__(self) -> tuple[type[FrozenTable], tuple[dict[str, Any]]]:
        return FrozenTable, (dict(self),)


def _whole(value: Any) -> Any:
    """JSON users write large counts as `5e8`, which is a float to the parser and a count to them."""
    if isinstance(value, bool):
        raise ValueError("should be an integer, not true or false")
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _bytes(value: Any) -> Any:
    """`"1.5G"` as a number; powers of 1024, as users write sizes of memory."""
    if not isinstance(value, str):
        return _whole(value)
    match = _SIZE.fullmatch(value.strip())
    if match is None:
        raise ValueError('should be bytes: a number, or one with a unit such as "512M" or "1.5G"')
    return int(float(match[1]) * 1024 ** ("KMGT".index(match[2].upper()) + 1 if match[2] else 0))


_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([KMGT]?)(?:i?B)?", re.IGNORECASE)
T = TypeVar("T")
_MOST = 2**63 - 1
"""No count of anything is larger; DeepSpeed writes this where there is no bound."""
# Bounds stand before the validator, or the JSON Schema lacks them.
Int = Annotated[int, Field(ge=-_MOST, le=_MOST), BeforeValidator(_whole)]
PositiveInt = Annotated[int, Field(gt=0, le=_MOST), BeforeValidator(_whole)]
Nbytes = Annotated[
    int,
    Field(gt=0, le=_MOST),
    BeforeValidator(_bytes),
    WithJsonSchema({"anyOf": [{"type": "integer", "exclusiveMinimum": 0}, {"type": "string"}]}),
]
"""Bytes, also as a string with a unit: `"1G"`."""
CountInt = Annotated[int, Field(ge=0, le=_MOST), BeforeValidator(_whole)]
Stage = Annotated[T, BeforeValidator(_whole)]
"""For a `Literal` of integers: without it `true` would pass as 1."""
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Listed = Annotated[T, BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)]
"""For a tuple that stands as a list in JSON."""
Params = Annotated[dict[str, Any], AfterValidator(FrozenTable)]
"""A free table, read-only once validated."""
PluginTable = Annotated[dict[str, Params], AfterValidator(FrozenTable)]
"""Plugins by the names of their entry points, each with its own options."""
