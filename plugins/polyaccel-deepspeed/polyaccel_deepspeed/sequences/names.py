"""`deepspeed.sequence` and `deepspeed.runtime.sequence_parallel`: long sequences by DeepSpeed's names.

DeepSpeed's recipe has three parts: `register_with_transformers` before the model is built, which gives an `mpu`;
`initialize(mpu=mpu)`; and an adapter around the loader, which deals each rank's batches to all ranks of its sequence.
The script weighs its losses by tokens itself, so an engine of this recipe leaves the model's batches alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from polyaccel.comm.base import Communicator
from polyaccel.comm.default import default_communicator
from polyaccel.errors import PolyaccelError
from polyaccel.torch.context_parallel import DistributedAttention as OurAttention
from polyaccel.torch.context_parallel import DocumentMask, SequenceSettings, TokenShares
from polyaccel.torch.context_parallel.batches import WholeBatch
from polyaccel.torch.context_parallel.exchange import gather_tokens


def communicator_of(group: Any) -> Communicator:
    """polyaccel's communicator of the ranks in torch's `group`; a communicator is returned as it is. Collective over
    all ranks, each with its own group."""
    if isinstance(group, Communicator):
        return group
    world = default_communicator()
    own = tuple(dist.get_process_group_ranks(group))
    found: Communicator | None = None
    for ranks in dict.fromkeys(tuple(each) for each in world.all_gather_object(list(own))):
        made = world if len(ranks) == world.world_size else world.split(ranks)
        found = made if ranks == own else found
    assert found is not None  # the own ranks are among the given ones
    return found


class DistributedAttention(nn.Module):
    """DeepSpeed Ulysses around `local_attention`, over the ranks of `sequence_process_group` (torch's or polyaccel's).

    Its arguments of streams and of the number of key heads have no effect: the tensors have the one, and there is no
    other. Called with queries, keys, values and the dim of rows, which follows from the two others.
    """

    def __init__(
        self,
        local_attention: Callable[..., Tensor],
        sequence_process_group: Any,
        scatter_idx: int = 2,
        gather_idx: int = 0,
        sp_stream: Any = None,
        num_kv_heads: int | None = None,
    ) -> None:
        super().__init__()
        self.spg = sequence_process_group
        communicator = communicator_of(sequence_process_group)
        self.local_attn = local_attention
        self._attention = OurAttention(self._local, communicator, scatter_idx, gather_idx)

    def _local(self, *args: Any, **named: Any) -> Tensor:
        return self.local_attn(*args, **named)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, batch_dim_idx: int, rotary_pos_emb: Any = None, *args: Any,
        **kwargs: Any,
    ) -> Tensor:  # fmt: skip
        if rotary_pos_emb is not None:
            raise PolyaccelError(
                "DistributedAttention was given rotary_pos_emb, which is not applied between the exchanges",
                hint="rotate queries and keys before: each rank has the positions of its tokens",
            )
        out: Tensor = self._attention(query, key, value, *args, **kwargs)
        return out


class SequenceMpu:
    """Which ranks share a sequence, as `initialize(mpu=...)` and scripts ask: neighbours do, as many as `size`."""

    def __init__(self, size: int) -> None:
        world = default_communicator()
        if size < 1 or world.world_size % size:
            raise PolyaccelError(
                f"sequence_parallel_size is {size}, no divisor of {world.world_size} ranks",
                hint="start a multiple of it, or use a divisor",
                value=size,
            )
        self._size, self._rank, self._count = size, world.rank, world.world_size
        groups = [range(first, first + size) for first in range(0, world.world_size, size)]
        others = [range(place, world.world_size, size) for place in range(size)]
        self._sequence, self._data = None, None
        if dist.is_initialized():
            for ranks in groups:
                made = dist.new_group(list(ranks))
                self._sequence = made if world.rank in ranks else self._sequence
            for ranks in others:
                made = dist.new_group(list(ranks))
                self._data = made if world.rank in ranks else self._data
        self.communicator = next(
            one for one in [world.split(ranks) for ranks in groups] if one is not None
        )  # all ranks split all groups, in one order

    def get_sequence_parallel_group(self) -> Any:
        """torch's group of the ranks that share this rank's sequences; polyaccel's where torch has none."""
        return self._sequence if self._sequence is not None else self.communicator

    def get_sequence_parallel_world_size(self) -> int:
        return self._size

    def get_sequence_parallel_rank(self) -> int:
        return self._rank % self._size

    def get_data_parallel_group(self) -> Any:
        """torch's group of the ranks at the same place of other sequences."""
        return self._data

    def get_data_parallel_world_size(self) -> int:
        return self._count // self._size

    def get_data_parallel_rank(self) -> int:
        return self._rank // self._size

    def get_model_parallel_world_size(self) -> int:
        return 1

    def get_model_parallel_rank(self) -> int:
        return 0


class UlyssesSPAttentionHF(nn.Module):
    """Attention of transformers' models over the ranks that share a sequence: `register_with_transformers`.

    An instance computes that of one layer with `attn`, an attention function of transformers', over `process_group`.
    Numbers of heads and lengths are read from the tensors.
    """

    def __init__(
        self,
        attn: Callable[..., Any],
        batch_size: int,
        attn_head_count: int,
        attn_head_size: int,
        kv_head_count: int,
        num_hidden_layers: int,
        process_group: Any,
        seq_length_is_variable: bool = False,
        local_seq_length: int | None = None,
        global_seq_length: int | None = None,
        disable_in_eval: bool = False,
    ) -> None:
        super().__init__()
        from polyaccel_deepspeed.sequences.registration import Registration

        self._registration = Registration(attn, communicator_of(process_group), "", disable_in_eval)

    def forward(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *args: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, Any]:  # fmt: skip
        return self._registration.attend(module, query, key, value, attention_mask, *args, **kwargs)

    @classmethod
    def register_with_transformers(
        cls,
        model_name_or_path: Any,
        core_attn_implementation: str,
        sequence_parallel_size: int,
        micro_batch_size: int = 1,
        seq_length: int | None = None,
        seq_length_is_variable: bool = True,
        disable_in_eval: bool = False,
        max_length: int | None = None,
    ) -> SequenceMpu | None:
        """From now on attention that transformers finds by the name `core_attn_implementation` works over ranks.

        Returns the `mpu` for `initialize`; None where no ranks share a sequence. The model's configuration is not
        needed: heads and lengths are read from tensors.
        """
        if sequence_parallel_size == 1:
            return None
        from polyaccel_deepspeed.sequences.registration import Registration

        mpu = SequenceMpu(sequence_parallel_size)
        Registration.of_name(core_attn_implementation, mpu.communicator, disable_in_eval)
        return mpu


class UlyssesSPDataLoaderAdapter:
    """The batches of a loader, whose ranks have their own batches, dealt to all ranks of `sp_group`: of each rank's
    batch in turn every rank gets its tokens. `labels` become `shift_labels`, shifted before the cut."""

    def __init__(self, dl: Iterable[Any], sp_rank: int, sp_group: Any, sp_world_size: int, device: Any) -> None:
        self.dl = dl
        self.device = torch.device(device)
        self._communicator = communicator_of(sp_group)

    def __len__(self) -> int:
        return len(self.dl) * self._communicator.world_size  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        communicator = self._communicator
        for batch in self.dl:
            own = {name: value for name, value in batch.items() if isinstance(value, Tensor)}
            gathered = communicator.all_gather_object({name: list(one.shape) for name, one in own.items()})
            for owner, shapes in enumerate(gathered):
                yield self._part(self._broadcast(own, shapes, owner))

    def _broadcast(self, own: Mapping[str, Tensor], shapes: Mapping[str, list[int]], owner: int) -> dict[str, Tensor]:
        """The batch of rank `owner`, on every rank: integers, for they are ids, places and labels."""
        found = {}
        for name, shape in shapes.items():
            is_own = owner == self._communicator.rank
            value = own[name].to(self.device, torch.int64, copy=True).contiguous() if is_own else None
            value = torch.empty(shape, dtype=torch.int64, device=self.device) if value is None else value
            self._communicator.broadcast(self._communicator.accelerator.wrap(value), owner, label="batch")
            found[name] = value
        return found

    def _part(self, whole: dict[str, Tensor]) -> dict[str, Any]:
        """This rank's tokens of a batch."""
        mask = whole.pop("attention_mask", None)
        if mask is not None and not bool(mask.all()):
            raise PolyaccelError(
                "a batch has an attention_mask with padding, which DeepSpeed's recipe cannot express",
                hint="pack documents and mark them by position_ids, or set the key sequence_parallel_size and leave "
                "the recipe out: polyaccel then cuts padded batches too",
            )
        rows, length = whole["input_ids"].shape
        if "position_ids" not in whole:
            whole["position_ids"] = torch.arange(length, device=self.device).expand(rows, -1)
        targets = WholeBatch(whole).targets(shifted=True)
        whole.pop("labels", None)
        if targets is not None:
            whole["shift_labels"] = targets
        shares = TokenShares.contiguous(length, self._communicator.world_size)
        return WholeBatch(whole).cut(shares, self._communicator.rank)


def marks_of_parts(communicator: Communicator, positions: Tensor | None, lengths: list[int]) -> DocumentMask:
    """Documents of the whole sequence, of which each rank has the positions of its own tokens. Collective."""
    if positions is None:
        return DocumentMask(sum(lengths))
    return DocumentMask.of_positions(gather_tokens(communicator, positions, lengths))


def ulysses_settings(core: str) -> SequenceSettings:
    """sdpa is computed block by block, without masks; the other names have their usual meaning."""
    return SequenceSettings("ulysses", "blockwise" if core in ("sdpa", "") else core)
