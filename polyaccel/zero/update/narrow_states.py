"""Elementwise optimizers whose states rest in fewer bits than the update computes with.

States pass through float32 memory of the kernels, tile by tile. In 8 bits they are a `BlockBuffer`. In bfloat16 they
are rounded stochastically ([Note: Stochastic rounding] in `ops.base`): to nearest, an average with a decay of 0.999
stands still, since its changes are below half the spacing. The random bits follow from parameter, state, update and
element.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import defaultdict
from collections.abc import Mapping, Sequence
from hashlib import blake2b

from polyaccel.comm.base import Communicator
from polyaccel.core.buffer import Buffer
from polyaccel.core.types import CODE_BLOCK, DType, ParamSpec
from polyaccel.ops.base import CAST, UPDATE, KernelTable, StateRole, StochasticRounding
from polyaccel.ops.optimizers import Optimizer
from polyaccel.zero.plan.layout import Granule, Slice
from polyaccel.zero.update.block_states import BlockBuffer
from polyaccel.zero.update.optimizers import ElementwiseOptimizer, Group, Shard

_HOST_TILE, _DEVICE_TILE = 2**16, 2**22
"""Elements: what stays in a cache, and what bounds the memory of a device."""


class NarrowStates(ElementwiseOptimizer):
    """Runs a row of `polyaccel.ops.optimizers` on states that pass through tiles of float32."""

    @abstractmethod
    def read_state(self, kernels: KernelTable, state: Buffer, tile: Buffer) -> None:
        """Write the numbers of a state to float32 memory of equal length."""

    @abstractmethod
    def write_state(self, kernels: KernelTable, tile: Buffer, state: Buffer, rounding: StochasticRounding) -> None:
        """Overwrite a state with numbers."""

    def update_shard(self, shard: Shard, group: Group, grad_scale: float, communicator: Communicator) -> None:
        compute, grad = shard.tier.compute, shard.grad
        assert grad is not None  # set by the step for every shard that it passes on
        most = min(_HOST_TILE if compute.works_on_host_memory else _DEVICE_TILE, shard.master.numel)
        rooms: list[Buffer] = []
        for piece in shard.slices:
            if (run := shard.run_of(piece)) is None:
                continue
            rule = self.row.rule(group, run.step)
            names = [name for name, _ in rule.formula.states]
            rooms += [compute.allocate(most, DType.FLOAT32) for _ in names[len(rooms) :]]
            for start in range(0, piece.length, most):
                window = piece.shard_offset + start, min(most, piece.length - start)
                tiles = [room.view(0, window[1]) for room in rooms[: len(names)]]
                states = [shard.states[name].view(*window) for name in names]
                for state, tile in zip(states, tiles, strict=True):
                    self.read_state(shard.kernels, state, tile)
                shard.kernels[UPDATE](
                    rule,
                    shard.master.view(*window),
                    grad.view(*window),
                    tiles,
                    None if shard.out is None else shard.out.view(*window),
                    grad_scale,
                    run.rounding and run.rounding.at(window[0] - run.offset),
                )
                for name, state, tile in zip(names, states, tiles, strict=True):
                    self.write_state(shard.kernels, tile, state, _rounding_of(piece, name, run.step, start))


class BlockStates(NarrowStates):
    """States in a byte an element. See [Note: Blocks of states]."""

    def __init__(self, row: Optimizer) -> None:
        super().__init__(row)
        roles = row.formula(defaultdict(float, decoupled=1.0)).states
        self._signed = {name: role is StateRole.AVERAGE for name, role in roles}

    @property
    def state_codes(self) -> Mapping[str, bool]:
        return self._signed

    @property
    def state_types(self) -> Mapping[str, DType]:
        return dict.fromkeys(self._signed, DType.UINT8)

    def granules(self, params: Sequence[ParamSpec]) -> Mapping[str, Granule]:
        block = Granule("block", CODE_BLOCK)
        return {param.fqn: block for param in params if param.trainable}

    def read_state(self, kernels: KernelTable, state: Buffer, tile: Buffer) -> None:
        assert isinstance(state, BlockBuffer)  # by `state_codes`
        state.decode_to(tile)

    def write_state(self, kernels: KernelTable, tile: Buffer, state: Buffer, rounding: StochasticRounding) -> None:
        assert isinstance(state, BlockBuffer)  # by `state_codes`
        state.encode_from(tile)
        state.memory.open_blocks.clear()


class RoundedStates(NarrowStates):
    """States in bfloat16, rounded stochastically."""

    @property
    def state_types(self) -> Mapping[str, DType]:
        return dict.fromkeys(self.row.states, DType.BFLOAT16)

    def read_state(self, kernels: KernelTable, state: Buffer, tile: Buffer) -> None:
        kernels[CAST](state, tile)

    def write_state(self, kernels: KernelTable, tile: Buffer, state: Buffer, rounding: StochasticRounding) -> None:
        kernels[CAST](tile, state, rounding)


def _rounding_of(piece: Slice, name: str, step: int, start: int) -> StochasticRounding:
    """The rounding of a state's elements from `start` of a slice on, in update number `step`."""
    digest = blake2b(f"{step} {piece.fqn} {name}".encode(), digest_size=8).digest()
    return StochasticRounding(int.from_bytes(digest, "little"), piece.start + start)
