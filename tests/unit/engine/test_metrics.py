"""Metrics arrive in the file as strict JSON, line by line, whatever the figures and however the last run ended."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyaccel.errors import ConfigError, InvariantError
from polyaccel.observability.metrics import ExpertFigures, JsonlMonitor, Monitor, StepMetrics, json_safe
from polyaccel.testkit.monitor import MonitorContract

METRICS = StepMetrics(
    step=3, loss=2.5, lr=(0.1, 0.2), grad_norm=4.0, grad_norm_clipped=1.0, loss_scale=65536.0, samples=96,
    step_time_s=0.5, samples_per_s=64.0, tokens_per_s=4096.0, peak_memory_nbytes=1 << 30, traffic_numel=1000,
    phase_s={"forward": 0.2, "backward": 0.3},
    experts={"mlp": ExpertFigures(
        tokens=(5, 1), dropped_share=0.25, balance=1.5, exchanged_nbytes=64, exchange_s=0.125,
    )},
)  # fmt: skip


def strict(line: str) -> Any:
    """JSON as other languages read it: no NaN, no Infinity."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    return json.loads(line, parse_constant=refuse)


def lines(directory: Path) -> list[Any]:
    return [strict(line) for line in (directory / "metrics.jsonl").read_text("utf-8").splitlines()]


class TestJsonl(MonitorContract):
    def make(self) -> JsonlMonitor:
        return JsonlMonitor()


def test_a_step_is_one_line_that_can_be_read_at_once(tmp_path: Path) -> None:
    monitor = JsonlMonitor()
    monitor.open(tmp_path / "new" / "run", {})
    monitor.write(METRICS)
    (record,) = lines(tmp_path / "new" / "run")  # before close
    assert record == {
        "step": 3, "loss": 2.5, "lr": [0.1, 0.2], "grad_norm": 4.0, "grad_norm_clipped": 1.0, "loss_scale": 65536.0,
        "skipped": False, "samples": 96, "step_time_s": 0.5, "samples_per_s": 64.0, "tokens_per_s": 4096.0,
        "peak_memory_nbytes": 1 << 30, "traffic_numel": 1000, "phase_s": {"forward": 0.2, "backward": 0.3},
        "experts": {"mlp": {
            "tokens": [5, 1], "dropped_share": 0.25, "balance": 1.5, "exchanged_nbytes": 64, "exchange_s": 0.125,
        }},
        "tflops": None, "model_flops_utilisation": None, "device_phase_s": {}, "collectives": {},
        "memory_nbytes": {}, "planned_nbytes": {}, "gradient_noise_scale": None,
    }  # fmt: skip
    monitor.close()


def test_figures_are_curves_too() -> None:
    scalars = {tag: value for tag, value, step in METRICS.scalars() if step == 3}
    assert (scalars["lr"], scalars["lr_1"]) == (0.1, 0.2)
    assert (scalars["phase_s/forward"], scalars["experts/mlp/balance"]) == (0.2, 1.5)
    assert "experts/mlp/tokens" not in scalars
    assert "tflops" not in scalars


def test_what_is_not_finite_is_null_and_flagged(tmp_path: Path) -> None:
    monitor = JsonlMonitor()
    monitor.open(tmp_path, {})
    monitor.write(StepMetrics(step=1, loss=math.nan, lr=(0.1, -math.inf), grad_norm=math.inf, skipped=True))
    monitor.write_events([("eval/loss", 1.5, 1), ("eval/ratio", math.inf, 1)])
    step, good, bad = lines(tmp_path)
    assert (step["loss"], step["lr"], step["grad_norm"], step["tokens_per_s"]) == (None, [0.1, None], None, None)
    assert step["nonfinite"] == {"loss": "nan", "lr.1": "-inf", "grad_norm": "inf"}
    assert good == {"tag": "eval/loss", "value": 1.5, "step": 1}
    assert bad == {"tag": "eval/ratio", "value": None, "step": 1, "nonfinite": {"value": "inf"}}
    monitor.close()


trees = st.recursive(
    st.none() | st.floats() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(max_size=3), trees))
def test_any_record_becomes_strict_json(record: dict[str, Any]) -> None:
    flagged = json_safe(record)
    assert strict(json.dumps(flagged, allow_nan=False)) == flagged
    assert ("nonfinite" in flagged) == any(word in repr(_floats(record)) for word in ("nan", "inf"))


def _floats(value: Any) -> list[float]:
    if isinstance(value, dict):
        return [number for item in value.values() for number in _floats(item)]
    if isinstance(value, list):
        return [number for item in value for number in _floats(item)]
    return [value] if isinstance(value, float) else []


@pytest.mark.parametrize("tail", ["", '{"step": 2, "lo', "x" * 10_000])
def test_a_resumed_run_appends_after_the_last_whole_line(tmp_path: Path, tail: str) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n' + tail, "utf-8")
    monitor = JsonlMonitor()
    monitor.open(tmp_path, {})
    monitor.write_events([("a", 1.0, 2)])
    monitor.close()
    assert lines(tmp_path) == [{"step": 1}, {"tag": "a", "value": 1.0, "step": 2}]


def test_a_file_without_a_whole_line_begins_anew(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("y" * 9000, "utf-8")
    monitor = JsonlMonitor()
    monitor.open(tmp_path, {})
    monitor.close()
    assert lines(tmp_path) == []


def test_misuse_is_refused(tmp_path: Path) -> None:
    monitor = JsonlMonitor()
    monitor.close()
    with pytest.raises(InvariantError) as caught:
        monitor.write(METRICS)
    assert caught.value.value is not None
    with pytest.raises(ConfigError) as caught:
        monitor.open(tmp_path, {"interval": 5})
    assert [(problem.key, problem.value) for problem in caught.value.problems] == [("jsonl.interval", 5)]
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(ConfigError) as caught:
        monitor.open(tmp_path / "taken", {})
    assert [problem.key for problem in caught.value.problems] == ["jsonl"]


def test_a_monitor_is_a_plugin_that_can_be_probed() -> None:
    assert issubclass(JsonlMonitor, Monitor)
    assert JsonlMonitor.probe().usable
    assert len(Monitor.__abstractmethods__) <= 15
