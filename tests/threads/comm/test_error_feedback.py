"""Errors of quantised gradients that are added to the next ones (LoCo): the formula in float64, and runs."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from parity_models import make_config, on_threads, train_on_threads
from stage3_models import CASES

import polyaccel
from polyaccel.accelerators.cpu import CpuAccelerator
from polyaccel.comm.wrappers.error_feedback import ErrorFeedback
from polyaccel.comm.wrappers.quantized import QuantizedCommunicator
from polyaccel.core.types import DType, ReduceOp
from polyaccel.errors import ConfigError
from polyaccel.testkit.ranks.threads import run_threads

BLOCK, BETA = 32, 0.75
ZERO = {"reduce_bucket_size": 64, "stage3_param_persistence_threshold": 10, "zero_quantized_gradients": True}


def rounded(values, most):
    """What codes of blocks stand for, in float64."""
    out = np.empty(len(values))
    for start in range(0, len(values), BLOCK):
        block = values[start : start + BLOCK].astype(np.float64)
        scale = float(np.float32(np.abs(block).max() / most))
        out[start : start + BLOCK] = np.clip(np.rint(block / scale), -most, most) * scale if scale else 0.0
    return out


class Formula:
    """One rank's errors of one bucket, in float64."""

    def __init__(self, parts, numel):
        self.errors = np.zeros((parts, numel))
        self.is_new = True

    def send(self, parts):
        """What codes of all parts stand for."""
        sent = []
        for index, part in enumerate(parts):
            wanted = part.astype(np.float64) + self.errors[index]
            sent.append(rounded(wanted, 7))
            kept = 0.0 if self.is_new else BETA * self.errors[index]
            self.errors[index] = rounded(kept + (1 - BETA) * (wanted - sent[-1]), 127)
        self.is_new = False
        return sent


@pytest.mark.parametrize(("world", "numel"), [(2, 70), (3, 41)])
def test_reductions_are_the_formula(world, numel):
    """Two buckets in turns, and errors that begin again after four reductions."""
    draw = np.random.default_rng(0)
    given = draw.standard_normal((6, world, world, numel)).astype(np.float32)

    def work(communicator):
        feedback = ErrorFeedback(CpuAccelerator(), beta=BETA, reset_every=4, block_numel=BLOCK)
        coded = QuantizedCommunicator(
            communicator, gather_bits=None, reduce_bits=4, block_numel=BLOCK, feedback=feedback
        )
        found = []
        for step in range(6):
            for bucket in (0, 1):
                source = communicator.allocate(world * numel, DType.FLOAT32)
                source.from_bytes((given[step, communicator.rank] * (1 + bucket)).tobytes())
                out = communicator.allocate(numel, DType.FLOAT32)
                coded.reduce_scatter(out, source, ReduceOp.SUM, bucket=bucket)
                found.append(np.frombuffer(out.to_bytes(), np.float32))
        return found

    results = run_threads(world, work)
    for bucket in (0, 1):
        formulas = [Formula(world, numel) for _ in range(world)]
        for step in range(6):
            if step == 4:
                formulas = [Formula(world, numel) for _ in range(world)]
            sent = [one.send(given[step, rank] * (1 + bucket)) for rank, one in enumerate(formulas)]
            for rank in range(world):
                total = np.sum([parts[rank] for parts in sent], axis=0)
                np.testing.assert_allclose(results[rank][2 * step + bucket], total, rtol=1e-4, atol=1e-4)


def test_what_is_left_out_arrives_later():
    """The mean of many reductions of the same gradient comes closer to it than one without feedback can."""
    numel = 64
    gradient = np.random.default_rng(1).standard_normal(2 * numel).astype(np.float32)

    def work(communicator, feedback):
        coded = QuantizedCommunicator(
            communicator, gather_bits=None, reduce_bits=4, block_numel=BLOCK, feedback=feedback
        )
        found = []
        for _ in range(60):
            source = communicator.allocate(2 * numel, DType.FLOAT32)
            source.from_bytes(gradient.tobytes())
            out = communicator.allocate(numel, DType.FLOAT32)
            coded.reduce_scatter(out, source, ReduceOp.AVG, bucket=0)
            found.append(np.frombuffer(out.to_bytes(), np.float32))
        return np.abs(np.mean(found, axis=0) - gradient[communicator.rank * numel :][:numel]).mean()

    def feedback():
        return ErrorFeedback(CpuAccelerator(), beta=0.0, reset_every=1000, block_numel=BLOCK)

    with_errors = run_threads(2, lambda communicator: work(communicator, feedback()))
    without = run_threads(2, lambda communicator: work(communicator, None))
    for kept, lost in zip(with_errors, without, strict=True):
        assert kept < 0.1 * lost


def run(config, steps, save=None, load=None):
    build, loss = CASES["gpt"]

    def work(communicator, module):
        engine, *_ = polyaccel.initialize(model=module, config=config)
        if load is not None:
            engine.load_checkpoint(load)
        for step in range(0 if load is None else 2, steps):
            engine.backward(loss(engine, step, 0, communicator.rank))
            engine.step()
            if save is not None and step == 1:
                engine.save_checkpoint(save)
        state = {name: value.clone() for name, value in engine.module_state_dict().items()}
        engine.destroy()
        return state

    return on_threads(2, work, build)[0]


def test_a_run_that_was_saved_and_one_that_resumes_have_the_same_bits(tmp_path):
    config = make_config(3, zero={**ZERO, "zeropp_loco_param": {"err_beta": 0.5, "reset_T": 7}})
    whole = run(config, 5, save=str(tmp_path))
    resumed = run(config, 5, load=str(tmp_path))
    assert all(torch.equal(value, resumed[name]) for name, value in whole.items())
    without = run(make_config(3, zero=ZERO), 5, save=str(tmp_path / "without"))
    assert any(not torch.equal(value, whole[name]) for name, value in without.items())


def test_a_change_of_the_loss_scale_begins_again():
    """Errors are multiples of the scale: a doubled one starts without them."""
    build, loss = CASES["gpt"]

    def work(communicator, module):
        fp16 = {"enabled": True, "initial_scale_power": 4, "loss_scale_window": 2}
        zero = {**ZERO, "zeropp_loco_param": {"err_beta": 0.5, "reset_T": 100}}
        engine, *_ = polyaccel.initialize(model=module, config=make_config(3, zero=zero, fp16=fp16))
        forgets = []
        original = engine.zero.forget_errors
        engine.zero.forget_errors = lambda: (forgets.append(engine.global_steps), original())
        scales = [engine.loss_scaler.loss_scale]
        for step in range(4):
            engine.backward(loss(engine, step, 0, communicator.rank))
            engine.step()
            scales.append(engine.loss_scaler.loss_scale)
        engine.destroy()
        return scales, forgets

    for scales, forgets in on_threads(2, work, build):
        changes = [step for step, (before, after) in enumerate(pairwise(scales)) if before != after]
        assert changes
        assert forgets == changes


@pytest.mark.parametrize(
    ("stage", "zero", "more", "key"),
    [
        (3, {}, {}, "zero_optimization.zeropp_loco_param"),
        (2, {"zero_quantized_gradients": True}, {}, "zero_optimization.zero_quantized_gradients"),
        (3, {"zero_quantized_gradients": True}, {"checkpoint": {"in_memory": True}}, "checkpoint.in_memory"),
    ],
)
def test_settings_that_do_not_fit(stage, zero, more, key):
    config = make_config(stage, zero={**zero, "zeropp_loco_param": {}}) | more
    with pytest.raises(ConfigError) as refused:
        polyaccel.config.load_config(config)
    assert key in [problem.key for problem in refused.value.problems]


def test_the_gradients_of_a_run_stay_close():
    build, loss = CASES["gpt"]
    config = make_config(3, accumulation=2, zero={**ZERO, "zeropp_loco_param": {}})
    coded = train_on_threads(3, config, 3, build=build, loss_fn=loss)
    exact = train_on_threads(3, make_config(3, accumulation=2), 3, build=build, loss_fn=loss)
    assert coded.norms == pytest.approx(exact.norms, rel=0.1)
