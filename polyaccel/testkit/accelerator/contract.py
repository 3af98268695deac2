"""The contract of accelerators as tests: subclass `AcceleratorContract`, define how to make yours, and pytest runs it.

    class TestMyDevice(AcceleratorContract):
        def make(self) -> Accelerator:
            return MyAccelerator()

Every promise of `polyaccel.accelerators.base` that can be tried on one device is tried for real: claimed element types
are computed with, claimed streams have to overlap, the kernel table is held against the float64 reference, and ten
steps are trained at every stage.
"""

from __future__ import annotations

from abc import abstractmethod
from importlib.util import find_spec
from unittest import SkipTest

import numpy as np

from polyaccel.accelerators.base import Accelerator, Capabilities, Probe
from polyaccel.comm.init.backends import comm_backend
from polyaccel.core.types import DType
from polyaccel.errors import PluginNotFound, ShardingError
from polyaccel.testkit.accelerator.kernels import KernelsContract
from polyaccel.testkit.accelerator.memory import MemoryContract, contents
from polyaccel.testkit.accelerator.streams import StreamsContract
from polyaccel.testkit.comparison import equal, refused, same_bytes, same_numbers
from polyaccel.testkit.contract import BrokenPromise
from polyaccel.testkit.ranks.threads import run_threads
from polyaccel.testkit.training.numpy_training import check_stages


class AcceleratorContract(KernelsContract, StreamsContract, MemoryContract):
    """The tests that every accelerator passes. A subclass only defines how to make the accelerator."""

    @abstractmethod
    def make(self) -> Accelerator:
        """Return a new accelerator."""

    def test_states_its_version_and_probes(self) -> None:
        """The class states the contract that it was written for, and its probe gives the reason of its answer: messages
        have nothing else."""
        accelerator = self.make()
        equal(accelerator.API_VERSION[0], Accelerator.API_VERSION[0], "major number of API_VERSION")
        probe = type(accelerator).probe()
        equal(type(probe), Probe, "type of what probe() gives")
        equal(bool(probe.reason), True, "whether probe() gives a reason")
        accelerator.close()

    def test_capabilities_are_stated(self) -> None:
        """`capabilities` has float32, of which master weights and norms are made, and names a comm backend that is
        installed: without either nothing can be composed."""
        accelerator = self.make()
        capabilities = accelerator.capabilities()
        equal(type(capabilities), Capabilities, "type of what capabilities() gives")
        if DType.FLOAT32 not in capabilities.dtypes:
            found = sorted(dtype.value for dtype in capabilities.dtypes)
            raise AssertionError(f"dtypes: expected float32 among them (master weights and norms), got {found}")
        try:
            backend = comm_backend(capabilities.default_comm)
        except PluginNotFound as error:
            hint = "let `default_comm` name one of these (gloo sends memory of any kind), or install what provides it"
            raise BrokenPromise(f"default_comm: {error.message}", hint=hint) from error
        equal(backend.name, capabilities.default_comm, "name of the backend that default_comm names")
        equal(accelerator.communication_backend_name(), capabilities.default_comm, "communication_backend_name()")

    def test_torch_knows_enough_of_the_device(self) -> None:
        """torch can do on the device what the engine asks of it, every row of `testkit.accelerator.torch_needs`:
        without them torch modules fail there with errors of torch's own."""
        accelerator = self.make()
        if accelerator.torch_device_type is None or find_spec("torch") is None:
            raise SkipTest("torch does not have the device, or is not installed: no torch module trains on it")
        from polyaccel.testkit.accelerator.torch_needs import NEEDS

        unmet: list[str] = []
        for need in NEEDS:
            try:
                need.check(accelerator)
            except SkipTest:
                continue
            except AssertionError as error:
                unmet.append(str(error))
        accelerator.close()
        if unmet:
            raise AssertionError("\n".join(unmet))

    def test_random_state_is_saved_and_restored(self) -> None:
        """A seed has one state, a state that was read comes back to the byte, reading draws nothing, and bytes that are
        not a state are a ShardingError that changes nothing: a restart continues with the numbers that would have
        come."""
        accelerator = self.make()
        original = accelerator.rng_state()
        equal(accelerator.rng_state() == original, True, "whether rng_state() read twice is the same")
        try:
            accelerator.manual_seed(7)
            seven = accelerator.rng_state()
            accelerator.manual_seed(8)
            eight = accelerator.rng_state()
            equal(eight == seven, False, "whether seeds 7 and 8 have one state")
            accelerator.set_rng_state(seven)
            same_bytes(accelerator.rng_state(), seven, "rng_state() after set_rng_state")
            accelerator.manual_seed(7)
            same_bytes(accelerator.rng_state(), seven, "rng_state() after a seed that was used before")
            accelerator.set_rng_state(eight)
            for state in (b"no state", b"", eight[: len(eight) // 2]):
                what = f"set_rng_state of {len(state)} bytes that are not a state"
                refused(lambda s=state: accelerator.set_rng_state(s), what, ShardingError)  # type: ignore[misc]
                same_bytes(accelerator.rng_state(), eight, f"rng_state() after {what}")
        finally:
            accelerator.set_rng_state(original)

    def test_a_restored_generator_draws_the_same_numbers(self) -> None:
        """After `set_rng_state` the device draws the numbers that it drew after `rng_state`: dropout repeats itself
        when a layer is computed again."""
        accelerator = self.make()
        buffer = accelerator.allocate(100, DType.FLOAT32)
        if not hasattr(buffer.raw, "uniform_"):
            raise SkipTest("only torch's arrays draw random numbers by themselves")
        state = accelerator.rng_state()
        drawn = [contents(accelerator.wrap(buffer.raw.uniform_())) for _ in range(2)]
        equal(np.array_equal(drawn[0], drawn[1]), False, "whether two draws are the same")
        accelerator.set_rng_state(state)
        for numbers in drawn:
            again = contents(accelerator.wrap(buffer.raw.uniform_()))
            same_numbers(again, numbers, "numbers drawn after set_rng_state")

    def test_ten_steps_agree_at_every_stage(self) -> None:
        """Two ranks as threads train ten steps at ZeRO stages 0 to 3 to the same bits, within rounding of float64: what
        the parts promise must add up."""
        run_threads(2, check_stages, 10, accelerator=self.make())
