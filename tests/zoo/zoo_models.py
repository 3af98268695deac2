"""The models of the zoo: every type of transformers' auto classes, tiny, with random weights and batches."""

from __future__ import annotations

import inspect
import zlib
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import CONFIG_MAPPING
from transformers.models.auto import modeling_auto
from zoo_shrink import DRAWN, candidates

KINDS = {
    "causal": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "masked": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    "sequence-to-sequence": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    "vision": modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
    "multimodal": modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    "audio": {
        **modeling_auto.MODEL_FOR_CTC_MAPPING_NAMES,
        **modeling_auto.MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES,
    },
    "speech": modeling_auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
}
"""Kinds of models, and the class of each type. State-space models and mixtures are among the causal ones."""
TEXTS = ("causal", "masked", "sequence-to-sequence", "multimodal")
MOST_PARAMETERS = 12_000_000


@dataclass(frozen=True)
class Entry:
    """A class of transformers, and the type of the config that it is built of."""

    kind: str
    type: str
    name: str

    @property
    def key(self) -> str:
        return f"{self.kind}/{self.type}"


@dataclass
class Tiny:
    """A tiny model of an entry."""

    entry: Entry
    model: nn.Module
    shrunk: str
    """How the config was made small."""
    batches: list[list[dict[str, Tensor]]] = field(default_factory=list)
    """Micro-batches of each step, two a step and of unlike lengths."""
    has_loss: bool = True


class NotBuilt(Exception):
    """No small config of a type can be built and trained by plain torch."""


def entries() -> list[Entry]:
    """Return one entry for each class, kinds in turn."""
    rows, seen = {kind: list[Entry]() for kind in KINDS}, set[str]()
    for kind, types in KINDS.items():
        names = {each: name if isinstance(name, str) else name[0] for each, name in types.items()}
        for each, name in sorted(names.items(), key=lambda one: (not _is_own(*one), one)):
            if name not in seen and each in CONFIG_MAPPING:
                seen.add(name)
                rows[kind].append(Entry(kind, each, name))
        rows[kind].sort(key=lambda one: zlib.crc32(one.name.encode()))  # no family before another
    # The kinds are mixed, so that a walk that is cut short has some of each.
    placed = [((at + 0.5) / len(row), kind, one) for kind, row in rows.items() for at, one in enumerate(row)]
    return [one for *_, one in sorted(placed, key=lambda each: each[:2])]


def _is_own(kind: str, name: str) -> bool:
    """Whether a class has the name of the type."""
    return name.lower().startswith(kind.replace("_", "").replace("-", ""))


def build(entry: Entry, steps: int = 2) -> Tiny:
    """Return the first small model that plain torch can train. Raises NotBuilt."""
    reasons = []
    for shrunk, make in _configs(entry):
        try:
            config = make()
            if getattr(config, "problem_type", None) is None and entry.kind in ("vision", "audio"):
                config.num_labels = 3
            kind = getattr(transformers, entry.name)
            with torch.device("meta"):
                count = sum(one.numel() for one in kind(config).parameters())
            if count > MOST_PARAMETERS:
                raise NotBuilt(f"{count / 1e6:.0f} M parameters")
            torch.manual_seed(0)
            model = kind(config).float().train()
            _draw_weights(model)
            tiny = Tiny(entry, model, shrunk)
            tiny.batches = [[_batch(entry, model, step, micro) for micro in (0, 1)] for step in range(steps)]
            tiny.has_loss = _trains(tiny)
            if model.main_input_name != "input_ids":  # transformers' own are always words
                type(model).dummy_inputs = tiny.batches[0][0]
        except Exception as error:  # whatever a config that was not made for it raises
            reasons.append(f"{type(error).__name__}: {' '.join(str(error).split())[:160]}")
            continue
        return tiny
    raise NotBuilt(reasons[0] if reasons else "no config")


def _configs(entry: Entry) -> Any:
    whole = CONFIG_MAPPING[entry.type]()
    own = getattr(transformers, entry.name).config_class
    if own is not None and not isinstance(whole, own):  # a model of texts within one of several kinds of input
        whole = own()
    made = candidates(whole)
    while True:
        try:
            shrunk, config = next(made)
        except StopIteration:
            return
        except Exception as error:
            failed = error

            def fail(failed: Exception = failed) -> Any:
                raise failed

            yield "", fail
            return
        yield shrunk, lambda config=config: config


def _draw_weights(model: nn.Module) -> None:
    """Move every parameter away from zeros and ones, at which gradients vanish and factors do not show."""
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for one in model.parameters():
            if one.is_floating_point():
                one.add_(0.05 * torch.randn(one.shape, generator=draw))


def _trains(tiny: Tiny) -> bool:
    """Whether the model has a loss; raises where it cannot be trained, or has nothing finite."""
    state = {name: one.clone() for name, one in tiny.model.state_dict().items()}
    buffers = {name: one.clone() for name, one in tiny.model.named_buffers()}
    outputs = []
    for batch in tiny.batches[0]:
        outputs.append(tiny.model(**batch))
        loss_of(outputs[-1]).backward()
    gradients = [one.grad for one in tiny.model.parameters() if one.grad is not None]
    if not all(bool(one.isfinite().all()) for one in gradients) or not any(bool(one.any()) for one in gradients):
        raise NotBuilt("no finite gradient")
    tiny.model.zero_grad()
    tiny.model.load_state_dict(state)
    for name, one in tiny.model.named_buffers():
        one.copy_(buffers[name])
    return getattr(outputs[0], "loss", None) is not None


def loss_of(output: Any) -> Tensor:
    """The model's loss, or a weighted sum of its first output."""
    loss = getattr(output, "loss", None)
    if loss is not None:
        return loss
    first = next(one for one in output.values() if isinstance(one, Tensor) and one.is_floating_point())
    weights = torch.arange(first[0].numel(), dtype=torch.float32).cos().view(first[0].shape)
    return (first.float() * weights).mean()


def _batch(entry: Entry, model: nn.Module, step: int, micro: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(100 * step + micro)
    accepted = inspect.signature(model.forward).parameters
    config = model.config
    if entry.kind == "vision":
        return {"pixel_values": _pixels(config, draw), "labels": torch.randint(0, 3, (2,), generator=draw)}
    length = 8 if micro else 12
    words = torch.randint(*DRAWN, (2, length), generator=draw)
    if entry.kind in ("audio", "speech"):
        batch = _sounds(config, accepted, draw)
        is_class = "Classification" in entry.name
        batch["labels"] = torch.randint(0, 3, (2,), generator=draw) if is_class else words[:, :4]
        return batch
    labels, mask = words.clone(), torch.ones_like(words)
    if entry.kind == "masked":
        labels[torch.rand(labels.shape, generator=draw) > 0.5] = -100
        labels[:, 1] = words[:, 1]
    elif entry.kind == "sequence-to-sequence":
        labels = torch.randint(*DRAWN, (2, length - 4), generator=draw)
    batch = {"input_ids": words}
    if micro and "attention_mask" in accepted:
        mask[1, -3:] = 0
        batch["attention_mask"] = mask
        if entry.kind != "sequence-to-sequence":
            labels = labels.masked_fill(mask == 0, -100)
    if "labels" in accepted:
        batch["labels"] = labels
    return batch


def _pixels(config: Any, draw: torch.Generator) -> Tensor:
    size = getattr(config, "image_size", None) or getattr(config, "input_size", None) or 64
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    channels = getattr(config, "num_channels", None) or 3
    return torch.randn(2, channels, height, width, generator=draw)


def _sounds(config: Any, accepted: Any, draw: torch.Generator) -> dict[str, Tensor]:
    if "input_values" in accepted:
        if (
            bins := getattr(config, "max_length", None)
            if config.model_type == "audio-spectrogram-transformer"
            else None
        ):
            return {"input_values": torch.randn(2, bins, config.num_mel_bins, generator=draw)}
        return {"input_values": torch.randn(2, 4000, generator=draw)}
    bins = getattr(config, "num_mel_bins", None) or getattr(config, "input_feat_per_channel", None)
    bins = bins or getattr(config, "feature_projection_input_dim", None) or 80
    if config.model_type == "whisper":
        return {"input_features": torch.randn(2, bins, 2 * config.max_source_positions, generator=draw)}
    return {"input_features": torch.randn(2, 32, bins, generator=draw)}
