"""A Hub id as MODEL of `polyaccel plan`: its folder in the cache of Hugging Face. Nothing is downloaded."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

from polyaccel.errors import PolyaccelError
from polyaccel.planner.model import parse_count

_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def model_folder(text: str) -> str:
    """Return the cached folder where `text` is a Hub id, else `text`. Raises PolyaccelError for an id whose config.json
    is not cached, and for one where transformers is not installed."""
    if Path(text).exists() or ":" in text or parse_count(text) is not None or _ID.fullmatch(text) is None:
        return text
    what = f"{text!r} is not a directory, and as a Hub id its config.json is not available"
    if find_spec("transformers") is None or find_spec("huggingface_hub") is None:
        hint = "install transformers, or write 1.3B, a directory with a config.json or my_package.model:build"
        raise PolyaccelError(f"{what}: transformers is not installed", hint=hint, value=text)
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(text, "config.json")
    if not isinstance(found, str):
        hint = f"run `hf download {text} config.json`, or write 1.3B, a directory with a config.json or module:function"
        raise PolyaccelError(f"{what}: it is not in the cache", hint=hint, value=text)
    return str(Path(found).parent)
