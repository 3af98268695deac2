"""Spreads, limits and findings of recorded runs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyaccel.verify.compare import MARGIN, Tolerances, differing_ranks, merge
from polyaccel.verify.variant import VARIABLE, Record, Variant, VerificationEnd, active_run, running


def values(shift=0.0, **changes):
    found = {
        "0/gradient/a": np.float32([1.0, 2.0]),
        "0/update/a": np.float32([0.5, 0.5]),
        "0/magnitude/a": np.float32(100.0),
        "0/loss/": np.float64(3.0),
        "0/attribute/calls": np.float64(2.0),
    }
    moved = {key: value + np.float32(shift) if "attribute" not in key else value for key, value in found.items()}
    return {**moved, **changes}


TOLERANCES = Tolerances.of_runs(values(), [values(-1e-5), values(1e-5)])


def test_a_run_within_the_spread_has_no_findings():
    assert TOLERANCES.findings(values(2e-5)) == []
    assert TOLERANCES.limit == pytest.approx(MARGIN, rel=0.1)


@pytest.mark.parametrize("key", ["0/gradient/a", "0/update/a", "0/loss/", "0/attribute/calls"])
def test_an_error_in_any_quantity_is_found(key):
    wrong = values()
    wrong[key] = wrong[key] * 1.01
    (found,) = TOLERANCES.findings(wrong)
    assert found.key == key
    assert found.found == pytest.approx(found.wanted * 1.01)


def test_causes_come_before_what_follows_from_them():
    wrong = {key: value * 2 for key, value in values().items()}
    assert [one.kind for one in TOLERANCES.findings(wrong)] == ["gradient", "update", "attribute", "loss"]


def test_parameters_come_in_the_order_of_the_forward_pass():
    plain = {f"0/gradient/{name}": np.float32([1.0]) for name in "abc"}
    found = Tolerances.of_runs(plain, [plain, plain]).findings({key: value * 2 for key, value in plain.items()}, "cab")
    assert [one.name for one in found] == ["c", "a", "b"]


def test_the_floor_of_an_update_is_the_last_place_of_its_parameter():
    tolerances = Tolerances.of_runs(values(), [values(), values()])
    assert tolerances.spreads["0/update/a"] == np.spacing(np.float32(100.0))
    assert tolerances.spreads["0/gradient/a"] == np.spacing(np.float32(2.0))


@pytest.mark.parametrize("wrong", [np.float32([1.0, np.nan]), np.float32([np.inf, 2.0]), np.float32([1.0])])
def test_what_is_not_finite_or_has_another_shape_is_found(wrong):
    (found,) = TOLERANCES.findings(values(**{"0/gradient/a": wrong}))
    assert found.spreads == np.inf


def test_values_that_are_not_finite_in_both_runs_agree():
    plain = values(**{"0/gradient/a": np.float32([np.nan, np.inf])})
    assert Tolerances.of_runs(plain, [plain, plain]).findings(plain) == []


def test_a_reference_in_float64_widens_what_rounding_has_moved():
    wrong = values(**{"0/loss/": np.float64(3.01)})
    assert [one.kind for one in TOLERANCES.findings(wrong)] == ["loss"]
    noisy = [f"0/gradient/{index}" for index in range(20)]
    plain = {**values(), **dict.fromkeys(noisy, np.float32([1.0]))}
    tolerances = Tolerances.of_runs(plain, [plain, plain])
    near, far = {**plain, "0/loss/": np.float64(3.02)}, {key: value + 1.0 for key, value in plain.items()}
    assert tolerances.findings({**plain, **wrong})
    assert not tolerances.widened(near).findings({**plain, **wrong})
    assert tolerances.widened(far).findings({**plain, **wrong})  # another computation excuses nothing


def test_causes_come_in_the_order_of_updates_of_several_engines():
    plain = {f"{step}/gradient/{name}": np.float32([1.0]) for step in (0, 1) for name in ("a", "1:b", "1:a")}
    wrong = {key: value * 2 for key, value in plain.items()}
    tolerances = Tolerances.of_runs(plain, [plain, plain])
    found = tolerances.findings(wrong, ["1:b", "1:a", "a"], ["1/0", "1/1", "0/0", "0/1"])
    assert [(one.engine, one.step, one.parameter) for one in found[:5]] == [
        (1, 0, "b"), (1, 0, "a"), (1, 1, "b"), (1, 1, "a"), (0, 0, "a"),
    ]  # fmt: skip


def test_each_rank_has_its_own_buffers():
    records = [Record(rank, {"0/buffer/a": np.float32([rank]), "0/norm/": np.float32(1.0)}) for rank in (0, 1)]
    plain = merge(records)
    assert set(plain) == {"0/buffer/a", "0/buffer/a@1", "0/norm/"}
    wrong = {**plain, "0/buffer/a@1": np.float32([2.0])}
    (found,) = Tolerances.of_runs(plain, [plain, plain]).findings(wrong)
    assert (found.parameter, found.rank) == ("a", 1)


@pytest.mark.parametrize("kind", ["input", "kept", "buffer"])
def test_parts_by_design_are_not_compared(kind):
    plain = {f"0/{kind}/a": np.float32([1.0, 2.0])}
    found = Tolerances.of_runs(plain, [plain, plain]).findings({f"0/{kind}/a": np.float32([1.0])})
    assert bool(found) == (kind == "buffer")


@given(st.floats(1e-3, 1e3), st.floats(0, 6))
def test_a_difference_counts_from_the_limit_on(scale, spreads):
    plain = {"0/gradient/a": np.float32([scale])}
    tolerances = Tolerances.of_runs(plain, [{"0/gradient/a": np.float32([scale * (1 + 1e-4)])}] * 2)
    step = tolerances.spreads["0/gradient/a"]
    near = {"0/gradient/a": np.float64([np.float32(scale) + spreads * step])}
    far = {"0/gradient/a": np.float64([np.float32(scale) + (tolerances.limit + 1) * step])}
    assert not tolerances.findings(near)
    assert len(tolerances.findings(far)) == 1


def test_losses_of_ranks_are_averaged_and_other_values_taken_once():
    records = [Record(rank, {"0/loss/": np.float64(rank), f"0/gradient/{rank}": np.float32([rank])}) for rank in (1, 0)]
    merged = merge(records)
    assert merged["0/loss/"] == 0.5
    assert set(merged) == {"0/loss/", "0/gradient/0", "0/gradient/1"}


def test_ranks_with_other_gradients_are_named():
    records = [Record(rank, {"0/gradient/a": np.float32([rank])}) for rank in (0, 1)]
    assert differing_ranks(records, 8.0, {"0/gradient/a": 1e-6}) == ["0/gradient/a"]
    assert differing_ranks(records, 8.0, {"0/gradient/a": 1.0}) == []


def test_a_record_is_written_and_read(tmp_path):
    record = Record(3, acted={"tensor_parallel": 2})
    record.add(0, "gradient", "layers.0/weight", np.float32([1.0]))
    record.write(tmp_path)
    read = Record.read(tmp_path / "rank3.npz")
    assert read.rank == 3
    assert read.acted == record.acted
    np.testing.assert_array_equal(read.values["0/gradient/layers.0/weight"], [1.0])


def test_a_variant_comes_from_the_environment(tmp_path, monkeypatch):
    variant = Variant("engine", without=("tiled_compute",), folder=str(tmp_path))
    monkeypatch.setattr("polyaccel.verify.variant._active", None)
    assert active_run({}) is None
    run = active_run({VARIABLE: variant.to_json()})
    assert run is not None
    assert run.variant == variant
    with running(Variant("plain")) as inner:
        assert active_run({}) is inner
    assert active_run({}) is run
    record = run.record_of(0)
    record.add(0, "loss", "", 1.0)
    record.engines = record.unfinished = 2
    run.end_engine(0)
    with pytest.raises(VerificationEnd):
        run.end_engine(0)
    assert Record.read(tmp_path / "rank0.npz").values["0/loss/"] == 1.0
