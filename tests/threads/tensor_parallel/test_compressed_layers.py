"""Compressed layers on tensor ranks: the masks, levels and losses of one rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from parity_models import make_config
from transformer_models import step_once, trained_by, transformer_model

import polyaccel
from polyaccel.errors import ConfigError, PolyaccelError
from polyaccel.testkit.ranks.threads import run_threads

Section = dict[str, Any]
LINEARS = {"llama": [r"layers\."], "gpt2": [r"h\."], "t5": [r"block\."]}
WIDE = {"llama": ("up_proj", ["down_proj", "gate_proj"]), "gpt2": ("c_fc", ["mlp.c_proj"]), "t5": ("wi_0", [r"\.wo$"])}
HEADS = {"gpt2": (r"attn\.c_proj", 7, None), "t5": (r"SelfAttention\.o$", 5, [r"SelfAttention\.v$"])}


def shared(**keys: Any) -> Section:
    return {"enabled": True, "schedule_offset": 1, **keys}


def weights(kind: str, bits: int, groups: int, **keys: Any) -> Section:
    params = {"start_bits": bits, "target_bits": bits, "quantization_period": 0}
    rules = {"a": {"params": params, "modules": [*LINEARS[kind], "embed", "wte", "^shared"]}}
    return {
        "weight_quantization": {"shared_parameters": shared(quantize_groups=groups, **keys), "different_groups": rules}
    }


def inputs(kind: str, calibration: str, how: str) -> Section:
    keys = shared(range_calibration=calibration, quantization_type=how)
    rules = {"a": {"params": {"bits": 8}, "modules": LINEARS[kind]}}
    return {"activation_quantization": {"shared_parameters": keys, "different_groups": rules}}


def sparse(kind: str, method: str, **keys: Any) -> Section:
    if method == "snip_momentum":
        keys |= {"dense_ratio": 0.5, "schedule_offset_stride": 1, "schedule_offset_end": 2, "block_pattern": "1x1"}
        keys["excluded_modules"] = ["lm_head"]
        return {"sparse_pruning": {"shared_parameters": shared(method=method, **keys), "different_groups": {}}}
    rules = {"a": {"params": {"dense_ratio": 0.5}, "modules": LINEARS[kind]}}
    return {"sparse_pruning": {"shared_parameters": shared(method=method), "different_groups": rules}}


def rows(kind: str, method: str) -> Section:
    module, related = WIDE[kind]
    rules = {"a": {"params": {"dense_ratio": 0.6}, "modules": [module], "related_modules": [related]}}
    return {"row_pruning": {"shared_parameters": shared(method=method), "different_groups": rules}}


def heads(kind: str) -> Section:
    module, count, related = HEADS[kind]
    rules = {"a": {"params": {"dense_ratio": 0.6}, "modules": [module], "related_modules": [related or []]}}
    keys = shared(method="topk", num_heads=count)
    return {"head_pruning": {"shared_parameters": keys, "different_groups": rules}}


SECTIONS: dict[str, tuple[str, Section]] = {
    "weights": ("llama", weights("llama", 4, 2)),
    "asymmetric": ("gpt2", weights("gpt2", 6, 7, quantization_type="asymmetric")),
    "ternary": ("t5", weights("t5", 2, 1)),
    "dynamic": ("llama", inputs("llama", "dynamic", "asymmetric")),
    "static": ("gpt2", inputs("gpt2", "static", "symmetric")),
    "sparse": ("gpt2", sparse("gpt2", "l1")),
    "learned": ("llama", sparse("llama", "topk")),
    "removed blocks": ("gpt2", sparse("gpt2", "snip_momentum")),
    "rows": ("llama", rows("llama", "l1")),
    "learned rows": ("gpt2", rows("gpt2", "topk")),
    "heads": ("gpt2", heads("gpt2")),
    "all": (
        "t5",
        {**weights("t5", 8, 2), **inputs("t5", "static", "asymmetric"), **sparse("t5", "l1"), **rows("t5", "topk")},
    ),
}


def config_of(section: Section, stage: int, **keys: Any) -> Any:
    adamw = {"type": "AdamW", "params": {"lr": 2e-3}}
    return make_config(stage, optimizer=adamw, gradient_clipping=1.0, compression_training=section, **keys)


def train(kind: str, section: Section, stage: int, data: int, tensor: int, **keys: Any) -> list[Any]:
    """The losses and norms, masks and whole parameters of each rank."""
    copies = [transformer_model(kind) for _ in range(data * tensor)]
    config = config_of(section, stage, **({"tensor_parallel": {"autotp_size": tensor}} if tensor > 1 else {}) | keys)

    def run(communicator: Any) -> Any:
        model = copies[communicator.rank]
        engine, *_ = polyaccel.initialize(model=model, config=config)
        found = trained_by(engine, kind, communicator.rank // tensor)
        state = {name: one.clone() for name, one in engine.module_state_dict().items()}
        engine.destroy()
        return *found, state

    return run_threads(data * tensor, run)


@pytest.mark.parametrize(
    ("name", "stage", "data", "tensor"),
    [
        ("weights", 0, 1, 2),
        ("asymmetric", 2, 2, 2),
        ("ternary", 3, 1, 2),
        ("dynamic", 1, 1, 3),
        ("static", 3, 2, 2),
        ("sparse", 3, 1, 2),
        ("learned", 2, 1, 2),
        ("removed blocks", 1, 2, 2),
        ("rows", 1, 1, 3),
        ("learned rows", 3, 1, 2),
        ("heads", 0, 1, 2),
        ("all", 3, 1, 2),
    ],
)
def test_tensor_ranks_compute_what_one_rank_does(name: str, stage: int, data: int, tensor: int) -> None:
    kind, section = SECTIONS[name]
    plain = train(kind, section, 0, data, 1)
    for rank, (losses, norms, state) in enumerate(train(kind, section, stage, data, tensor)):
        wanted, of_norms, of_one = plain[rank // tensor]
        assert losses == pytest.approx(wanted, rel=1e-4)
        assert norms == pytest.approx(of_norms, rel=2e-3)
        assert state.keys() == of_one.keys()
        for key, values in state.items():
            if key.endswith("_mask"):
                assert torch.equal(values, of_one[key]), key
            elif key.endswith("_scores"):
                torch.testing.assert_close(values, of_one[key], rtol=1e-3, atol=1e-5)


def test_tokens_are_shared_beside_compressed_layers() -> None:
    """Layers between regions have other tokens on each rank, and norms weights that are shared."""
    section = {**weights("llama", 4, 2), **inputs("llama", "dynamic", "symmetric"), **rows("llama", "topk")}
    plain = train("llama", section, 0, 1, 1)[0]
    parallel = {"autotp_size": 2, "sequence_sharded": True}
    for losses, norms, _ in train("llama", section, 1, 1, 2, tensor_parallel=parallel):
        assert losses == pytest.approx(plain[0], rel=1e-4)
        assert norms == pytest.approx(plain[1], rel=2e-3)


def test_blocks_that_are_recomputed_have_one_mask() -> None:
    section = {**weights("gpt2", 4, 7), **rows("gpt2", "l1")}
    plain = train("gpt2", section, 0, 1, 1)[0]
    for losses, _, _ in train("gpt2", section, 3, 1, 2, activation_checkpointing={"enabled": True}):
        assert losses == pytest.approx(plain[0], rel=1e-4)


def test_expert_ranks_train_the_compressed_layers_around_experts() -> None:
    section = {**inputs("llama", "static", "symmetric"), **sparse("llama", "topk")}
    plain = train("mixtral", section, 0, 2, 1)
    found = train("mixtral", section, 2, 2, 1, expert_parallel={"enabled": True, "autoep_size": 2})
    for (losses, norms, _), (wanted, of_norms, _) in zip(found, plain, strict=True):
        assert losses == pytest.approx(wanted, rel=1e-4)
        assert norms == pytest.approx(of_norms, rel=2e-3)


WIDE_WEIGHT = "transformer.h.0.mlp.c_fc.weight"


def test_a_checkpoint_fits_any_mesh_and_is_exported_on_one_rank(tmp_path: Any) -> None:
    """Saved by two tensor ranks, loaded by one rank, and back again; the cut model itself has no export."""
    kind, section = "gpt2", {**weights("gpt2", 4, 7), **rows("gpt2", "topk")}
    sizes: list[int] = []

    def run(communicator: Any, model: Any, tensor: int, load: str | None, save: str, steps: range) -> list[float]:
        keys = {"tensor_parallel": {"autotp_size": tensor}} if tensor > 1 else {}
        config = config_of(section, 1, **keys)
        engine, *_ = polyaccel.initialize(model=model, config=config)
        if load is not None:
            engine.load_checkpoint(str(tmp_path / load))
        losses = [step_once(engine, kind, step, 0) for step in steps]
        engine.save_checkpoint(str(tmp_path / save))
        engine.destroy()
        if tensor > 1:
            with pytest.raises(PolyaccelError):
                polyaccel.redundancy_clean(model, config)
        else:
            sizes.append(polyaccel.redundancy_clean(model, config).state_dict()[WIDE_WEIGHT].shape[1])
        return losses

    def on(tensor: int, load: str | None, save: str, steps: range) -> list[float]:
        copies = [transformer_model(kind) for _ in range(tensor)]
        each: list[list[float]] = run_threads(tensor, lambda one: run(one, copies[one.rank], tensor, load, save, steps))
        return each[0]

    straight = on(1, None, "straight", range(5))
    found = on(2, None, "two", range(2)) + on(1, "two", "one", range(2, 4)) + on(2, "one", "last", range(4, 5))
    assert found == pytest.approx(straight, rel=1e-4)
    assert sizes == [round(0.6 * 4 * 28)] * 2


TERNARY_INPUTS = inputs("llama", "dynamic", "symmetric")
TERNARY_INPUTS["activation_quantization"]["different_groups"]["a"]["params"]["bits"] = 2
REFUSED: dict[str, tuple[Section, dict[str, Any], str]] = {
    "mean of all features": (TERNARY_INPUTS, {}, "bits"),
    "one range of all tokens": (
        inputs("llama", "static", "symmetric"),
        {"tensor_parallel": {"autotp_size": 2, "sequence_sharded": True}},
        "tensor_parallel.sequence_sharded",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_ranks_cannot_compute_is_refused(name: str) -> None:
    section, keys, key = REFUSED[name]
    copies = [transformer_model("llama") for _ in range(2)]

    def run(communicator: Any) -> bool:
        config = config_of(section, 1, **{"tensor_parallel": {"autotp_size": 2}, **keys})
        with pytest.raises(ConfigError) as caught:
            polyaccel.initialize(model=copies[communicator.rank], config=config)
        return any(problem.key.endswith(key) for problem in caught.value.problems)

    assert run_threads(2, run) == [True, True]
