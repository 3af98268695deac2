"""What a tensor rank has in memory, and touches of its checkpoint's file, while a loaded model is cut."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from polyaccel import zero
from polyaccel.comm.base import Communicator
from polyaccel.core.block import Block
from polyaccel.testkit.ranks.procs import RankPool
from polyaccel.torch.deferred_init.log import return_holes
from polyaccel.torch.tensor_parallel import parallelize
from polyaccel.torch.tensor_parallel.make_plan import make_plan

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is read from Linux's /proc")
MIB = 2**20


def anonymous_mib() -> float:
    """Memory of this process that is no file's."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) / 1024


def touched_mib(folder: str) -> float:
    """What this process has touched of the mapped files in a folder."""
    touched, is_ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        key, *rest = line.split()
        if not key.endswith(":"):
            is_ours = folder in line
        elif key == "Rss:" and is_ours:
            touched += int(rest[0])
    return touched / 1024


def load_and_cut(communicator: Communicator, folder: str) -> tuple[float, float]:
    """MiB that the process had more than before at most, and MiB of the file that it touched."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    AutoModelForCausalLM.from_pretrained(folder)  # code that is loaded on first use
    gc.collect()
    return_holes()
    start = peak = anonymous_mib()

    def watched(whole: Tensor, block: Block) -> Tensor:
        nonlocal peak
        found = original(whole, block)
        peak = max(peak, anonymous_mib())
        return found

    original, parallelize.local_slice = parallelize.local_slice, watched  # type: ignore[attr-defined]
    try:
        with zero.Init():
            model = AutoModelForCausalLM.from_pretrained(folder)
        parallelize.parallelize_module(model, communicator, make_plan(model, communicator.world_size))
        return peak - start, touched_mib(folder)
    finally:
        parallelize.local_slice = original  # type: ignore[attr-defined]


def test_a_rank_has_its_half_in_memory_and_touches_its_part_of_the_file(
    rank_pool: Callable[..., RankPool], tmp_path: Path
) -> None:
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 4}
    ends = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    model = AutoModelForCausalLM.from_config(LlamaConfig(**sizes, vocab_size=16000, **ends))
    own = sum(parameter.nbytes for parameter in model.parameters()) / MIB
    model.save_pretrained(tmp_path)
    del model
    for peak, touched in rank_pool(2).run(load_and_cut, str(tmp_path)):
        assert own > 90
        assert peak < own / 2 + 12
        # Files are mapped in pieces of up to 2 MiB, and rows of layers that are cut by inputs lie closer together.
        assert touched < 0.8 * own
