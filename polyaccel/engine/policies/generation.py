"""How an engine generates: the values that follow from the config's `hybrid_engine` and `generation`."""

from __future__ import annotations

from dataclasses import dataclass

from polyaccel.config import Config


@dataclass(frozen=True, slots=True)
class GenerationPolicy:
    """How an engine generates.

    `max_tokens` bounds prompt and new tokens of a sequence (None: any number). `gathers_once`: sharded parameters are
    gathered once for a rollout where memory allows, if they are at most `most_numel` elements (None: any number).
    `empties_cache`: memory that the device's allocator keeps is returned to the device after a rollout. `is_exact`:
    logits are computed as training computes them, bit for bit.
    """

    max_tokens: int | None = None
    gathers_once: bool = True
    most_numel: int | None = None
    empties_cache: bool = False
    is_exact: bool = False


def generation_policy_of(config: Config) -> GenerationPolicy:
    """Return the generation policy of the config; a section that is off asks for nothing."""
    section, zero = config.hybrid_engine, config.zero_optimization
    most = zero.max_live_parameters if "max_live_parameters" in zero.model_fields_set else None
    if not section.enabled:
        return GenerationPolicy(most_numel=most, is_exact=config.generation.exact)
    return GenerationPolicy(
        max_tokens=section.max_out_tokens,
        gathers_once=section.pin_parameters,
        most_numel=most,
        empties_cache=section.release_inference_cache,
        is_exact=config.generation.exact,
    )
