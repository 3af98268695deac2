"""Tiny random models in a local cache of the Hugging Face hub, under the names that peers' tests load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

_REVISION = "0" * 40
_GPT2 = ("gpt2", "sshleifer/tiny-gpt2", "hf-internal-testing/tiny-random-gpt2")


def make_hub(cache: Path) -> None:
    """Fill `cache`, once."""
    if cache.is_dir():
        return
    import transformers

    sizes = {"vocab_size": 128, "n_positions": 64, "n_embd": 16, "n_layer": 2, "n_head": 2}
    vision = transformers.MobileViTConfig(hidden_sizes=[16, 24, 32], neck_hidden_sizes=[8, 8, 8, 16, 16, 16, 32])
    for name in _GPT2:
        _save(cache, name, transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)))
    _save(cache, "apple/mobilevit-xx-small", vision)


def _save(cache: Path, name: str, model: Any) -> None:
    home = cache / f"models--{name.replace('/', '--')}"
    model.save_pretrained(home / "snapshots" / _REVISION)
    (home / "refs").mkdir(exist_ok=True)
    (home / "refs" / "main").write_text(_REVISION)
