"""The contract of accelerators as tests: subclass `AcceleratorContract`, say how to make yours, and pytest runs it.

    class TestMyDevice(AcceleratorContract):
        def make(self) -> Accelerator:
            return MyAccelerator()

Every promise of `polyaccel.accelerators.base` that can be tried on one device is tried for real: claimed element types
are computed with, claimed streams have to overlap, the kernel table is held against the float64 reference, and ten
steps are trained at every stage.
"""

from __future__ import annotations

from abc import abstractmethod
from unittest import SkipTest

import numpy as np

from polyaccel.accelerators.base import Accelerator, Capabilities, Probe
from polyaccel.comm.join.backends import comm_backend
from polyaccel.testkit.accelerator.kernels import KernelsContract
from polyaccel.testkit.accelerator.memory import MemoryContract, contents
from polyaccel.testkit.accelerator.streams import StreamsContract
from polyaccel.testkit.contract import refused
from polyaccel.testkit.ranks.threads import run_threads
from polyaccel.testkit.training.numpy_training import check_stages
from polyaccel.types import DType


class AcceleratorContract(KernelsContract, StreamsContract, MemoryContract):
    """The tests that every accelerator passes. A subclass only says how to make the accelerator."""

    @abstractmethod
    def make(self) -> Accelerator: ...

    def test_states_its_version_and_probes(self) -> None:
        accelerator = self.make()
        assert accelerator.API_VERSION[0] == Accelerator.API_VERSION[0]
        probe = type(accelerator).probe()
        assert isinstance(probe, Probe)
        assert probe.reason, "a probe gives its reason, whatever the answer"
        accelerator.close()

    def test_capabilities_are_stated(self) -> None:
        accelerator = self.make()
        capabilities = accelerator.capabilities()
        assert isinstance(capabilities, Capabilities)
        assert DType.FLOAT32 in capabilities.dtypes, "float32 is what master weights and norms are made of"
        backend = comm_backend(capabilities.default_comm)  # raises, naming it, where nothing has the name
        assert backend.name == capabilities.default_comm == accelerator.communication_backend_name()

    def test_random_state_is_saved_and_restored(self) -> None:
        accelerator = self.make()
        original = accelerator.rng_state()
        try:
            accelerator.manual_seed(7)
            seven = accelerator.rng_state()
            accelerator.manual_seed(8)
            assert accelerator.rng_state() != seven, "two seeds have the same state"
            accelerator.set_rng_state(seven)
            assert accelerator.rng_state() == seven
            accelerator.manual_seed(7)
            assert accelerator.rng_state() == seven, "a seed has two states"
            refused(lambda: accelerator.set_rng_state(b"no state"), "a random state that is none")
        finally:
            accelerator.set_rng_state(original)

    def test_a_restored_generator_draws_the_same_numbers(self) -> None:
        accelerator = self.make()
        buffer = accelerator.allocate(100, DType.FLOAT32)
        if not hasattr(buffer.raw, "uniform_"):
            raise SkipTest("only torch's arrays draw random numbers by themselves")
        state = accelerator.rng_state()
        drawn = [contents(accelerator.wrap(buffer.raw.uniform_())) for _ in range(2)]
        assert not np.array_equal(drawn[0], drawn[1])
        accelerator.set_rng_state(state)
        for numbers in drawn:
            np.testing.assert_array_equal(contents(accelerator.wrap(buffer.raw.uniform_())), numbers)

    def test_ten_steps_agree_at_every_stage(self) -> None:
        """Two ranks as threads, ZeRO stages 0 to 3: the same bits, and within rounding those of float64."""
        run_threads(2, check_stages, 10, accelerator=self.make())
