"""A token by its parts: products, attention, norms and activations, Python, in CPU time of one thread.

    .venv/bin/python -m bench.token_parts llama 29m,126m

The operations that a token makes in one call are run one by one, the time of a call taken off; *else* is what a whole
token takes beyond them: embeddings, copies and Python. *choosing* is a softmax and a draw. Best of five.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable
from time import thread_time
from typing import Any

import torch

from bench.cases.generation import make_engine, weight_nbytes
from polyaccel.ops.base import KernelTable
from polyaccel.ops.decode import DECODE_OPS, DECODE_STEPS, AttentionStep, LinearStep
from polyaccel.ops.torch.decode import decode_kernels
from polyaccel.torch.generation.decode.loop import Draws
from polyaccel.torch.generation.decode.model import Decoder
from polyaccel.torch.generation.decode.proof import proved
from polyaccel.torch.generation.decode.structure import structure_of

_PROMPT, _AT, _TIMES = 64, 80, 5


def best(run: Callable[[], object]) -> float:
    """Return the milliseconds of the fastest of some runs."""
    found = []
    for _ in range(_TIMES):
        start = thread_time()
        run()
        found.append((thread_time() - start) * 1e3)
    return min(found)


def parts_of(model: Any, rows: int) -> dict[str, float]:
    """Return milliseconds by part of a token of `rows` sequences, and of their prompts."""
    kernels, listed = decode_kernels(), list[Any]()

    def keep(steps: Any) -> Any:
        listed.extend(steps)
        return kernels[DECODE_STEPS](steps)

    table = KernelTable("kept", {**{op: kernels[op] for op in DECODE_OPS}, DECODE_STEPS: keep})
    decoder = Decoder(proved(model, structure_of(model), kernels), table, rows, 2 * _PROMPT)
    prompts = torch.randint(1, 256, (rows, _PROMPT))
    found = {"prompts": best(lambda: decoder.prefill(list(prompts), range(rows)))}
    places = torch.arange(rows), torch.full((rows,), _AT)
    logits = decoder.step(prompts[:, 0].contiguous(), *places)
    found["token"] = best(lambda: decoder.step(prompts[:, 0].contiguous(), *places))
    found["choosing"] = best(lambda: Draws(True, 3).tokens(logits.float(), list(range(rows))))
    empty = kernels[DECODE_STEPS]([])
    call = best(lambda: [empty(rows) for _ in range(100)]) / 100
    rounds: list[dict[str, float]] = []
    singles = [(_name(step), kernels[DECODE_STEPS]([step])) for step in listed]
    for _ in range(_TIMES):
        spent: dict[str, float] = defaultdict(float)
        for name, run in singles:
            start = thread_time()
            run(rows)
            spent[name] += (thread_time() - start) * 1e3 - call
        rounds.append(spent)
    found.update({name: min(one[name] for one in rounds) for name in rounds[0]})
    found["else"] = found["token"] - sum(found[name] for name in rounds[0])
    return found


def _name(step: Any) -> str:
    return "products" if isinstance(step, LinearStep) else "attention" if isinstance(step, AttentionStep) else "rows"


def main(kind: str, sizes: str) -> None:
    """Print a line for each size, type and batch."""
    torch.set_num_threads(1)
    names = ("token", "products", "attention", "rows", "else", "choosing", "prompts")
    print(f"| size | type | sequences | {' | '.join(names)} | GB/s of products |")
    for size in sizes.split(","):
        for dtype in ("float32", "bfloat16"):
            engine = make_engine(kind, size, dtype)
            with torch.no_grad():
                for rows in (1, 16):
                    found = parts_of(engine.module.eval(), rows)
                    speed = weight_nbytes(engine.module) / found["products"] / 1e6
                    figures = " | ".join(f"{found[name]:.2f}" for name in names)
                    print(f"| {size} | {dtype} | {rows} | {figures} | {speed:.1f} |", flush=True)
            engine.destroy()


if __name__ == "__main__":
    main(*sys.argv[1:])
