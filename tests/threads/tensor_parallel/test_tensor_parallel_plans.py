"""What is to be cut: by what a user says, what a model says of itself, or its structure; alike for every rank."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformer_models import transformer_model

from polyaccel.engine.policies.modules import LayerRule
from polyaccel.errors import ShardingError
from polyaccel.torch.tensor_parallel.make_plan import make_plan

TABLE = """\
Qwen3ForCausalLM over 2 tensor ranks
module                           how               parameter  whole    each of 2 ranks     times
model.layers.*.self_attn.q_proj  column            weight     32 x 24  16 x 24             2
model.layers.*.self_attn.k_proj  column            weight     16 x 24  8 x 24              2
model.layers.*.self_attn.v_proj  column            weight     16 x 24  8 x 24              2
model.layers.*.self_attn.o_proj  row               weight     24 x 32  24 x 16             2
model.layers.*.self_attn.q_norm  shared weights    weight              whole               2
model.layers.*.self_attn.k_norm  shared weights    weight              whole               2
model.layers.*.mlp.gate_proj     column            weight     37 x 24  19 x 24 or 18 x 24  2
model.layers.*.mlp.up_proj       column            weight     37 x 24  19 x 24 or 18 x 24  2
model.layers.*.mlp.down_proj     row               weight     24 x 37  24 x 19 or 24 x 18  2
model.embed_tokens               vocabulary        weight     67 x 24  34 x 24 or 33 x 24  1
lm_head                          column, gathered  weight     67 x 24  34 x 24 or 33 x 24  1
"""


class Block(nn.Module):
    """A feed-forward layer with names that nobody knows, and a fused layer."""

    def __init__(self) -> None:
        super().__init__()
        self.broad = nn.Linear(8, 12)
        self.back = nn.Linear(12, 8, bias=False)
        self.three = nn.Linear(8, 18)


def plan_of(kind: str, ranks: int, **options):
    return make_plan(transformer_model(kind), ranks, **options)


def cut_names(plan) -> dict[str, str]:
    return {module.name: module.how for module in plan.modules}


def test_the_table_shows_modules_shapes_and_what_stays_whole() -> None:
    table = plan_of("qwen3", 2).table()
    assert table.startswith(TABLE)
    assert table.endswith("elements are cut; the others are whole on every rank (the model's own tp_plan)")


def test_a_model_without_a_plan_is_cut_by_its_structure() -> None:
    plan = plan_of("bert", 2)
    assert plan.source == "by structure"
    names = cut_names(plan)
    assert names["bert.encoder.layer.0.attention.output.dense"] == "row"
    assert names["bert.encoder.layer.1.intermediate.dense"] == "column"
    assert names["bert.embeddings.word_embeddings"] == "vocabulary"
    assert "cls.predictions.transform.dense" not in names
    assert "bert.embeddings.position_embeddings" not in names


def test_structure_and_the_models_own_plan_agree() -> None:
    for kind in ("llama", "qwen3", "mixtral"):
        model = transformer_model(kind)
        bare = copy.deepcopy(model)
        bare._tp_plan = {}
        bare.config.base_model_tp_plan = None
        own, found = make_plan(model, 2), make_plan(bare, 2)
        assert found.source == "by structure"
        assert {m.name: m for m in own.modules} == {m.name: m for m in found.modules}


def test_a_plan_needs_no_values() -> None:
    model = transformer_model("llama")
    assert make_plan(copy.deepcopy(model).to("meta"), 3) == make_plan(model, 3)


def test_specs_cut_what_they_match_and_say_of_which_parts_a_layer_consists() -> None:
    specs = [
        LayerRule((r".*broad\.weight$",)),
        LayerRule((r".*back\.weight$",), "row"),
        LayerRule((r"three\.weight",), "column", ((12, 3, 3), -1), 0),
    ]
    plan = make_plan(Block(), 3, specs=specs, use_defaults=False)
    blocks = {m.name: [plan.block(m, "weight", rank).runs for rank in range(3)] for m in plan.modules}
    assert blocks["broad"] == [(((4 * r, 4),), ((0, 8),)) for r in range(3)]
    assert blocks["back"] == [(((0, 8),), ((4 * r, 4),)) for r in range(3)]
    assert blocks["three"] == [(((4 * r, 4), (12 + r, 1), (15 + r, 1)), ((0, 8),)) for r in range(3)]
    thirds = make_plan(Block(), 2, specs=[LayerRule(("three",), "column", (3, -1), 0)], use_defaults=False)
    assert thirds.block(thirds.modules[0], "bias", 1).runs == (((3, 3), (9, 3), (15, 3)),)


def test_a_spec_leaves_out_what_the_model_would_cut() -> None:
    specs = [LayerRule((r".*self_attn\.[qkvo]_proj.*",), "skip")]
    names = cut_names(plan_of("qwen2", 2, specs=specs))
    assert not any("self_attn" in name for name in names)
    assert names["model.layers.0.mlp.down_proj"] == "row"


def test_a_gathered_layer_beside_one_with_split_inputs_is_cut_in_order() -> None:
    model = Block()
    model._tp_plan = {"broad": "colwise_gather_output", "back": "rowwise_split_input"}
    plan = make_plan(model, 2)
    assert [(m.name, m.sizes) for m in plan.modules] == [("broad", (6, 6)), ("back", (6, 6))]


@pytest.mark.parametrize(
    ("change", "value"),
    [
        (lambda model: None, "Block"),
        (lambda model: setattr(model, "_tp_plan", {"broad": "by_magic"}), "by_magic"),
        (lambda model: setattr(model, "_tp_plan", {"norm": "colwise"}), "norm"),
        (lambda model: setattr(model, "_tp_plan", {"small": "colwise"}), "small"),
        (lambda model: setattr(model, "_tp_plan", {"broad": "packed_colwise"}), None),
        (lambda model: setattr(model, "_tp_plan", {"odd": "packed_colwise"}), "odd"),
    ],
)
def test_a_model_that_cannot_be_cut_says_which_module_and_why(change, value: object) -> None:
    model = Block()
    model.norm, model.small, model.odd = nn.LayerNorm(8), nn.Linear(8, 3), nn.Linear(8, 13)
    change(model)
    if value is None:
        assert make_plan(model, 4).modules[0].name == "broad"
        return
    with pytest.raises(ShardingError) as caught:
        make_plan(model, 4)
    assert caught.value.value == value
    assert "tensor_parallel.partition_config" in caught.value.hint


def test_patterns_that_match_nothing_and_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ShardingError) as caught:
        make_plan(Block(), 2, specs=[LayerRule((r"tree\.weight",))])
    assert caught.value.value == ("tree\\.weight",)
    assert "'broad.weight'" in caught.value.hint
    with pytest.raises(ShardingError) as caught:
        make_plan(Block(), 2, specs=[LayerRule(("three",), "column", ((12, 3), -1), 0)])
    assert caught.value.value == ((12, 3), -1)


def test_more_ranks_than_heads_are_refused_by_the_name_of_the_module() -> None:
    with pytest.raises(ShardingError) as caught:
        plan_of("llama", 7)
    assert caught.value.value == 6
    assert "model.layers.0.self_attn" in str(caught.value)


def test_latent_attention_is_cut_by_heads_and_shares_its_rotary_keys() -> None:
    class LatentAttention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.num_heads, self.qk_rope_head_dim = 3, 2
            self.q_b_proj = nn.Linear(8, 3 * 6)
            self.kv_a_proj_with_mqa = nn.Linear(8, 5 + 2)
            self.kv_b_proj = nn.Linear(5, 3 * 8)
            self.o_proj = nn.Linear(3 * 4, 8)

    model = nn.Module()
    model.attn = LatentAttention()
    model.config = SimpleNamespace()
    model._tp_plan = {
        "attn.q_b_proj": "colwise",
        "attn.kv_a_proj_with_mqa": "mla_kv_a_proj",
        "attn.kv_b_proj": "colwise",
        "attn.o_proj": "rowwise",
    }
    plan = make_plan(model, 2)
    by_name = {m.name: m for m in plan.modules}
    assert by_name["attn.q_b_proj"].cuts["weight"] == (0, (((0, 12),), ((12, 6),)))
    assert by_name["attn.kv_b_proj"].cuts["weight"] == (0, (((0, 16),), ((16, 8),)))
    assert by_name["attn.o_proj"].cuts["weight"] == (1, (((0, 8),), ((8, 4),)))
    assert by_name["attn.kv_a_proj_with_mqa"].rows == (((5, 2),),) * 2
    assert plan.heads[0].attributes == {"num_heads": (2, 1)}
    assert torch.Size([7, 8]) == model.attn.kv_a_proj_with_mqa.weight.shape


@pytest.mark.parametrize("words", [("lm_head",), ("lm_head", "model.embed_tokens")])  # transformers 5.23, 5.24
def test_a_plan_of_its_own_for_words_alone_leaves_the_layers_to_structure(words: tuple[str, ...]) -> None:
    model = transformer_model("gpt_oss")
    assert {"lm_head"} <= set(model._tp_plan) <= {"lm_head", "model.embed_tokens"}
    styles = {"lm_head": "colwise_gather_output", "model.embed_tokens": "embedding_rowwise"}
    plan = make_plan(model, 2)
    assert plan.source == "by structure"
    assert {each.how for each in plan.modules} >= {"column", "row", "vocabulary", "experts", "shared weights"}
    model._tp_plan = {name: styles[name] for name in words}
    assert make_plan(model, 2) == plan
