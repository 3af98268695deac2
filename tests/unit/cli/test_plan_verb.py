"""`polyaccel plan`: its figures, its verdict on limits, and what it prints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from polyaccel.cli.main import main
from polyaccel.cli.plan.command import parse_size
from polyaccel.cli.plan.hub import model_folder
from polyaccel.cli.plan.tables import short_bytes, short_count
from polyaccel.comm.benchmark import SpeedRow, speed_table
from polyaccel.config import load_resolved
from polyaccel.core.types import DType
from polyaccel.planner.forecast import (
    SETTINGS,
    CheckpointMemory,
    Setting,
    cheapest_first,
    checkpoint_nbytes,
    copies_of_state,
    forecasts,
)
from polyaccel.planner.model import shape_of_count
from polyaccel.zero.plan.memory import Purpose
from polyaccel.zero.plan.placement import Place

CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 4,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW"},
    "zero_optimization": {"stage": 2},
}
MODEL = shape_of_count(1_000_000_000, DType.BFLOAT16)


@pytest.fixture
def path(tmp_path: Path) -> str:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(CONFIG))
    return str(file)


def _resolved(**changes: Any) -> Any:
    return load_resolved({**CONFIG, **changes}, world_size=8)


def test_every_setting_is_forecast_and_the_config_s_own_is_marked() -> None:
    found = forecasts(_resolved(), MODEL, 8)
    assert [forecast.setting for forecast in found] == list(SETTINGS)
    assert len(SETTINGS) == 15
    assert [forecast.setting for forecast in found if forecast.is_own] == [Setting(2, "none")]


def test_a_setting_of_the_config_that_is_rarely_worth_it_is_forecast_too() -> None:
    found = forecasts(_resolved(zero_optimization={"stage": 3, "offload_param": {"device": "cpu"}}), MODEL, 8)
    assert [forecast.setting for forecast in found] == [*SETTINGS, Setting(3, "none", "cpu")]
    assert [forecast.is_own for forecast in found] == [*(False for _ in SETTINGS), True]


def test_parameters_that_rest_elsewhere_let_a_model_fit_that_one_device_cannot_hold() -> None:
    alone = shape_of_count(7_000_000_000, DType.BFLOAT16)
    found = {forecast.setting: forecast for forecast in forecasts(_resolved(), alone, 1)}
    limits = {"device_nbytes": 12 * 2**30, "host_nbytes": 200 * 2**30}
    fitting = [setting for setting, forecast in found.items() if forecast.fits(**limits)]
    assert fitting == [Setting(3, "cpu", "cpu"), Setting(3, "nvme", "cpu"), Setting(3, "nvme", "nvme")]
    host, files = (found[setting].memory for setting in fitting[::2])
    rests = {row.place for row in host.rows if row.purpose is Purpose.PARAMS and row.nbytes}
    assert rests == {Place.HOST}
    assert host.peak_nbytes(Place.NVME) == 0
    kept = 2 * 10**9  # `max_in_cpu` elements of two bytes, in whole buckets
    assert files.peak_nbytes(Place.NVME) == pytest.approx(14 * alone.numel - kept, rel=0.01)


def test_figures_are_those_of_the_paper_where_nothing_else_is_known() -> None:
    found = {(f.setting.stage, f.setting.offload): f.memory for f in forecasts(_resolved(), MODEL, 8)[:12]}
    billion = pytest.approx(1e9, rel=1e-3)
    assert found[0, "none"].nbytes(Purpose.PARAMS) / 2 == billion
    assert found[1, "none"].nbytes(Purpose.OPTIM) * 8 / 8 == billion
    assert found[3, "none"].nbytes(Purpose.PARAMS) * 8 / 2 == billion
    # The paper's 16 bytes, and 2 of parameters on their way to the device, which no later bucket waits for.
    assert found[3, "cpu"].peak_nbytes(Place.HOST) * 8 / 18 == billion
    assert found[3, "nvme"].peak_nbytes(Place.NVME) * 8 / 12 == billion
    assert found[2, "cpu"].peak_nbytes(Place.DEVICE) < found[2, "none"].peak_nbytes(Place.DEVICE)
    assert found[2, "cpu"].peak_nbytes(Place.NVME) == found[2, "none"].peak_nbytes(Place.HOST) == 0


@pytest.mark.parametrize(
    ("optimizer", "bytes_a_param"),
    [({"type": "AdamW"}, 12), ({"type": "Lion"}, 8), ({"type": "RMSprop"}, 12), (None, 12)],
)
def test_a_checkpoint_has_masters_and_states(optimizer: dict[str, Any] | None, bytes_a_param: int) -> None:
    assert checkpoint_nbytes(_resolved(optimizer=optimizer), MODEL) == bytes_a_param * MODEL.numel


def test_copies_of_a_ranks_state_are_counted() -> None:
    """A rank saves its share of everything; replicas are two of it, and count against the host's limit."""
    share = 12 * MODEL.numel // 8
    assert copies_of_state(_resolved(), MODEL, 8) == CheckpointMemory(share, 0)
    kept = _resolved(checkpoint={"in_memory": True, "async": False})
    assert copies_of_state(kept, MODEL, 8) == CheckpointMemory(0, 2 * share)
    plain, replicated = (next(f for f in forecasts(each, MODEL, 8) if f.is_own) for each in (_resolved(), kept))
    most = plain.memory.peak_nbytes(Place.HOST) + 2 * share - 1
    assert plain.fits(device_nbytes=None, host_nbytes=most)
    assert not replicated.fits(device_nbytes=None, host_nbytes=most)
    assert replicated.fits(device_nbytes=None, host_nbytes=most + 1)


def test_the_share_that_is_offloaded_is_obeyed() -> None:
    half = _resolved(zero_optimization={"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 0.5}})
    (own,) = (forecast for forecast in forecasts(half, MODEL, 8) if forecast.is_own)
    rows = {(row.place, row.purpose): row.nbytes for row in own.memory.rows}
    assert own.setting.offload == "cpu"
    assert rows[Place.HOST, Purpose.OPTIM] == pytest.approx(rows[Place.DEVICE, Purpose.OPTIM], rel=0.2)


def test_the_cheapest_in_traffic_comes_first_and_then_what_offloads_less() -> None:
    ordered = cheapest_first(forecasts(_resolved(), MODEL, 8))
    sent = [forecast.traffic.total_nbytes for forecast in ordered]
    assert sent == sorted(sent)
    assert [(f.setting.stage, f.setting.offload) for f in ordered[:2]] == [(1, "none"), (0, "none")]
    assert [forecast.setting.offload for forecast in ordered[:6]] == ["none", "none", "cpu", "cpu", "nvme", "nvme"]


SPEEDS = [
    SpeedRow(operation, nbytes, nbytes / bandwidth, nbytes / bandwidth)
    for operation, bandwidth in (("all_reduce", 1e9), ("reduce_scatter", 2e9), ("all_gather", 4e9))
    for nbytes in (1 << 10, 1 << 30)
]


def test_a_table_of_speeds_gives_the_seconds_of_communication(
    path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    speeds = tmp_path / "speeds.json"
    speeds.write_text(speed_table("gloo", "cpu", "float32", [4, 4], "2026-11-23 07:00", SPEEDS).to_json())
    assert main(["plan", path, "1B", "-n", "8", "--json", "--comm", str(speeds), "--compute", "2"]) == 0
    found = {_setting(each): each for each in _json(capsys)["settings"]}
    for setting, each in found.items():
        traffic = each["traffic"]
        wholes = {  # of 8 ranks, in two bytes an element
            "all_reduce": 2 * traffic["all_reduce_numel"] / (2 * 7 / 8),
            "reduce_scatter": 2 * traffic["reduce_scatter_numel"] / (7 / 8),
            "all_gather": 2 * traffic["all_gather_numel"] / (7 / 8),
        }
        seconds = wholes["all_reduce"] / 1e9 + wholes["reduce_scatter"] / 2e9 + wholes["all_gather"] / 4e9
        assert each["comm_s"] == pytest.approx(seconds, rel=1e-3), setting
        assert each["step_s"] == pytest.approx(2 + seconds, rel=1e-3)
    assert found[Setting(1, "none")]["comm_s"] < found[Setting(0, "none")]["comm_s"]
    assert main(["plan", path, "1B", "-n", "8", "--comm", str(speeds)]) == 0
    shown = capsys.readouterr().out
    assert "astest communication first" in shown
    assert "comm s" in shown
    assert "step s" not in shown
    assert "as measured on 8 ranks" in " ".join(shown.split())


def test_other_groups_and_quantised_traffic_are_timed_by_their_own_sizes(tmp_path: Path) -> None:
    speeds = speed_table("gloo", "cpu", "float32", [4, 4], "2026-11-23 07:00", SPEEDS)
    plain = {"stage": 3}
    for changes in ({"zero_quantized_gradients": True}, {"zero_hpz_partition_size": 4}):
        own, other = (
            next(f for f in forecasts(_resolved(zero_optimization=zero), MODEL, 8, speeds) if f.is_own)
            for zero in (plain, {**plain, **changes})
        )
        assert own.comm_s is not None
        assert other.comm_s is not None
        assert other.comm_s < own.comm_s


def test_a_compute_time_without_speeds_is_refused(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", path, "1B", "-n", "8", "--compute", "2"]) == 1
    assert "polyaccel comm bench --json FILE" in capsys.readouterr().err


def _json(capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(capsys.readouterr().out)


def _setting(found: dict[str, Any]) -> Setting:
    return Setting(found["stage"], found["offload"], found["offload_param"])


def test_limits_choose_what_fits(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", path, "1B", "-n", "8", "--json"]) == 0
    everything = _json(capsys)
    assert len(everything["fitting"]) == 15
    peaks = {_setting(each): each["peak_nbytes"] for each in everything["settings"]}
    limit = peaks[Setting(2, "none")]["device"]
    assert main(["plan", path, "1B", "-n", "8", "--json", "--memory", str(limit), "--host-memory", "1K"]) == 0
    chosen = _json(capsys)
    fits = {_setting(each) for each in chosen["settings"] if each["fits"]}
    assert fits == {setting for setting, peak in peaks.items() if peak["device"] <= limit and peak["host"] <= 1024}
    assert {_setting(each) for each in chosen["fitting"]} == fits
    assert Setting(2, "none") in fits
    assert chosen["limits"] == {"device_nbytes": limit, "host_nbytes": 1024}
    assert chosen["model"]["numel"] == 10**9


VERDICT = (
    "Best of 14 settings that fit 9.00 GiB of device memory: stage 1, no offload, 7.32 GiB of the device (activations "
    "not counted). This config's setting fits too."
)


def test_the_report_is_readable_at_80_columns(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", path, "1B", "-n", "8", "--limit-device", "9G"]
    assert main(words) == 0
    short = capsys.readouterr().out
    assert " ".join(short.split()).startswith(VERDICT)
    assert "reduce-scatter" not in short
    assert main([*words, "--all"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    text = "\n".join(lines)
    assert "1.00B parameters; 8 ranks" in text
    assert "Activations" in text
    assert [line.split()[:3] for line in lines if line.startswith("2*")] == [
        ["2*", "none", "8.15G"],
        ["2*", "none", "device"],
    ]
    assert sum(line.startswith("3      nvme/nvme  device ") for line in lines) == 1
    assert not any("…" in line for line in lines)  # nothing was cut


def test_nothing_that_fits_is_exit_code_1(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", path, "1B", "-n", "8", "--limit-device", "1M"]) == 1
    assert "No setting fits 1.00 MiB of device memory" in capsys.readouterr().out


def test_an_unknown_optimizer_is_said_to_be_assumed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**CONFIG, "optimizer": {"type": "RMSprop"}}))
    assert main(["plan", str(file), "1B", "-n", "1"]) == 0
    assert "names RMSprop: 2 states a parameter are assumed" in capsys.readouterr().out


@pytest.mark.parametrize("model", ["what", "1.3X"])
def test_what_is_no_model_is_an_error(path: str, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", path, model, "-n", "2"]) == 1
    assert model in capsys.readouterr().err


def test_a_hub_id_is_the_folder_of_its_cached_config(
    path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = pytest.importorskip("huggingface_hub")
    cached = tmp_path / "snapshot"
    cached.mkdir()
    monkeypatch.setattr(
        hub, "try_to_load_from_cache", lambda name, file: str(cached / file) if name == "acme/m" else None
    )
    assert model_folder("acme/m") == str(cached)
    assert [model_folder(text) for text in ("1.3B", "a.b:c", str(tmp_path))] == ["1.3B", "a.b:c", str(tmp_path)]
    assert main(["plan", path, "acme/absent", "-n", "2"]) == 1
    assert "hf download acme/absent config.json" in capsys.readouterr().err


def test_a_wrong_size_is_a_wrong_argument(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", path, "1B", "-n", "2", "--limit-host", "many"]) == 2
    assert "'many' is not a size" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("16G", 16 * 2**30), ("1.5T", 3 * 2**39), ("512MiB", 2**29), ("2KB", 2048), ("77", 77), ("8g", 2**33)],
)
def test_sizes(text: str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "-"),
        (999, "999"),
        (1000, "0.98K"),
        (1024, "1.00K"),
        (10 * 2**20, "10.0M"),
        (999 * 2**30, "999G"),
        (2**50, "1024T"),
    ],
)
def test_bytes_are_short(nbytes: int, text: str) -> None:
    assert short_bytes(nbytes) == text


def test_counts_are_short() -> None:
    assert [short_count(numel) for numel in (0, 12, 7_000_000_000, 1_234_000)] == ["-", "12", "7.00B", "1.23M"]
