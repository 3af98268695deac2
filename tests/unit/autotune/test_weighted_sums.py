"""Sums of features with weights that measurements correct."""

from __future__ import annotations

import pytest

from polyaccel.planner.autotune.cost_model import RidgeRegression, Weight


def test_without_measurements_the_weights_are_those_that_are_known() -> None:
    found = RidgeRegression({"a": Weight(2.0, 1.0), "b": Weight(3.0, 0.0)})
    found.fit([])
    assert found({"a": 1.0, "b": 2.0}) == 8.0


def test_measurements_decide_where_they_say_more() -> None:
    found = RidgeRegression({"a": Weight(1.0, 10.0), "b": Weight(1.0, 10.0), "c": Weight(5.0, 0.0)})
    truth = {"a": 4.0, "b": 2.0, "c": 5.0}
    rows = [{"a": 1.0, "b": 1.0, "c": 1.0}, {"a": 2.0, "b": 1.0, "c": 0.0}, {"a": 1.0, "b": 3.0, "c": 2.0}]
    found.fit([(row, sum(truth[name] * size for name, size in row.items()), 1e-4) for row in rows])
    assert found.weights == pytest.approx(truth, rel=1e-3)


def test_one_measurement_moves_what_may_be_furthest_off() -> None:
    found = RidgeRegression({"sure": Weight(1.0, 0.01), "unsure": Weight(1.0, 1.0)})
    found.fit([({"sure": 1.0, "unsure": 1.0}, 3.0, 1e-3)])
    assert found.weights["sure"] == pytest.approx(1.0, abs=0.01)
    assert found({"sure": 1.0, "unsure": 1.0}) == pytest.approx(3.0, rel=0.01)


def test_a_weight_stays_above_its_least() -> None:
    found = RidgeRegression({"a": Weight(1.0, 1.0, least=0.0), "b": Weight(1.0, 1.0)})
    found.fit([({"a": 1.0}, -4.0, 1e-3)])
    assert found.weights == {"a": 0.0, "b": 1.0}


def test_what_is_measured_more_exactly_counts_more() -> None:
    found = RidgeRegression({"a": Weight(1.0, 10.0)})
    found.fit([({"a": 1.0}, 2.0, 0.3), ({"a": 1.0}, 3.0, 0.01)])
    assert found.weights["a"] == pytest.approx(3.0, rel=0.01)
