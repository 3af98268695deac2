"""What a config leaves open is assumed for a plan, and said; what is wrong with it is still an error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from polyaccel.cli.main import main
from polyaccel.config.auto import RULES
from polyaccel.config.sections.optimizer import OPTIMIZER_PARAMS
from polyaccel.errors import ConfigError
from polyaccel.planner.assumptions import planned_config

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
@pytest.mark.parametrize("example", ["gpt", "cifar10"])
def test_the_examples_can_be_planned_on_any_number_of_ranks(
    example: str, world_size: int, capsys: pytest.CaptureFixture[str]
) -> None:
    file = EXAMPLES / example / "config.json"
    written = json.loads(file.read_text())
    assert main(["plan", str(file), "11M", "-n", str(world_size), "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["world_size"] == world_size
    assert len(plan["settings"]) == 15
    said = "\n".join(plan["assumptions"])
    for key in ("scheduler.params.total_num_steps", "scheduler.params.warmup_num_steps", "bf16.enabled"):
        assert (f"{key} = " in said) == (example == "gpt")
    fits = written["train_batch_size"] % world_size == 0
    assert ("training would refuse it" in said) == (not fits)
    assert len(plan["assumptions"]) == 3 * (example == "gpt") + (not fits)


def test_each_assumption_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(EXAMPLES / "gpt" / "config.json"), "11M", "-n", "3"]) == 0
    out = capsys.readouterr().out
    assert out.count("Assumed: ") == 4
    assert 'Assumed: bf16.enabled = false: it is "auto" in the config.\n' in out


def test_nothing_is_assumed_of_a_config_that_says_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert planned_config({"train_batch_size": 12}, 3).assumptions == ()


@pytest.mark.parametrize(
    ("sizes", "world_size", "resolved"),
    [
        ({"train_batch_size": 12}, 8, (16, 2, 1)),
        ({"train_batch_size": 12, "gradient_accumulation_steps": 2}, 8, (16, 1, 2)),
        ({"train_batch_size": 12, "train_micro_batch_size_per_gpu": 4}, 2, (8, 4, 1)),
        (
            {"train_batch_size": 12, "train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 2},
            8,
            (48, 3, 2),
        ),
        ({"train_batch_size": "auto", "gradient_accumulation_steps": 4}, 2, (8, 1, 4)),
        ({"train_batch_size": "auto", "train_micro_batch_size_per_gpu": 3}, 2, (6, 3, 1)),
        ({}, 2, (2, 1, 1)),
    ],
)
def test_batch_sizes_that_do_not_fit_are_replaced(
    sizes: dict[str, Any], world_size: int, resolved: tuple[int, int, int]
) -> None:
    config = planned_config(sizes, world_size).config
    found = (config.train_batch_size, config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps)
    assert found == resolved


def test_every_key_that_may_be_auto_can_be_planned() -> None:
    tree: dict[str, Any] = {"optimizer": {"type": "Adam"}, "scheduler": {"type": "WarmupDecayLR"}}
    for key in RULES:
        *parents, name = key.split(".")
        table = tree
        for parent in parents:
            table = table.setdefault(parent, {})
        table[name] = "auto"
    config = planned_config(tree, 4).config
    assert config.auto_keys == frozenset()
    assert config.optimizer is not None
    assert config.optimizer.params["lr"] == OPTIMIZER_PARAMS["Adam"].model_fields["lr"].default


@pytest.mark.parametrize(
    ("config", "key"),
    [
        ({"train_batch_siz": 8}, "train_batch_siz"),
        ({"train_batch_size": 8, "data_parallel_size": 3}, "data_parallel_size"),
        ({"train_batch_size": 8, "zero_optimization": {"stage": "auto"}}, "zero_optimization.stage"),
    ],
)
def test_what_is_wrong_is_still_an_error(config: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        planned_config(config, 8)
    assert [problem.key for problem in caught.value.problems] == [key]
