"""Tokens a second of `engine.generate` by our decoder and the module's own method, one thread, interleaved.

A rollout is a prompt of 64 tokens for each sequence and the new tokens. Times are those of the processor, for others
may use the machine; *ratio* is of the medians, *best* of the fastest rollouts. *a token* is without the prompts. *of
reading* is the share of the memory's speed at which a step reads the weights, from the fastest rollouts, over the
fastest sum of an array that no cache holds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from time import thread_time
from typing import Any

import torch

from bench.measure import interleave
from bench.runner import OUT, Option, begin, parse, record, say, table
from bench.sizes import SHAPES
from polyaccel.ops.native import describe_native

_PROMPT = 64
_VOCABULARY = 256
_READ_NBYTES = 256 << 20


def main(argv: Sequence[str]) -> int:
    """Print a table of models, types and batches."""
    options = {
        "kinds": Option(("gpt2", "llama"), "architectures"),
        "sizes": Option(("29m", "126m"), "sizes"),
        "types": Option(("float32", "bfloat16", "int8", "int4"), "element types; integers compared with bfloat16"),
        "batches": Option((1, 16), "sequences"),
        "tokens": Option(32, "new tokens"),
        "rounds": Option(2, "rollouts each"),
        "out": OUT,
    }
    args = parse("generation", __doc__ or "", options, argv)
    begin()
    torch.set_num_threads(1)
    say(f"kernels: {describe_native()}")
    rows, kept = [], {}
    for kind in args.kinds:
        for size in args.sizes:
            for dtype in args.types:
                engine = make_engine(kind, size, dtype)
                for batch in args.batches:
                    name = f"{kind} {size} {dtype} {batch}"
                    kept[name] = seconds = compare(engine, batch, args.tokens, args.rounds)
                    read = weight_nbytes(engine.module)
                    rows.append((kind, size, dtype, str(batch), *figures(seconds, batch, args.tokens, read)))
                    say(", ".join(rows[-1]))
                engine.destroy()
    columns = (
        "model",
        "size",
        "type",
        "batch",
        "ours tokens/s",
        "module's",
        "ratio",
        "best",
        "ratio a token",
        "of reading",
    )
    table(f"Rollouts of {args.tokens} new tokens, {args.rounds} each", columns, rows)
    record(args.out, "generation", kept)
    return 0


def make_engine(kind: str, size: str, dtype: str) -> Any:
    """Return an engine of one rank at stage 0, whose model never ends a sequence."""
    import transformers

    import polyaccel

    layers, width, heads = SHAPES[size]
    common: dict[str, Any] = {"vocab_size": _VOCABULARY, "bos_token_id": 0, "eos_token_id": None, "pad_token_id": 0}
    if kind == "gpt2":
        sizes: dict[str, Any] = {"n_embd": width, "n_layer": layers, "n_head": heads, "n_positions": 1024}
        model: Any = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **common))
    else:
        sizes = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads}
        inner = width * 8 // 3 // 32 * 32
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **common, intermediate_size=inner))
    if dtype in ("int8", "int4"):
        return polyaccel.init_inference(model.bfloat16(), dtype=dtype)
    config = {"train_batch_size": 1, "optimizer": {"type": "SGD"}, "bf16": {"enabled": dtype == "bfloat16"}}
    return polyaccel.initialize(model=model, config=config)[0]


def compare(engine: Any, batch: int, tokens: int, rounds: int) -> dict[str, list[float]]:
    """Return the processor's seconds of rollouts, and of those of one token."""
    prompts = torch.randint(1, _VOCABULARY, (batch, _PROMPT), generator=torch.Generator().manual_seed(batch))
    calls: dict[str, Callable[[], float]] = {}
    for owner in ("ours", "module"):
        for count in (tokens, 1):
            asked = {"max_new_tokens": count, "do_sample": False, "own_decoder": owner == "ours"}
            calls[f"{owner} {count}"] = partial(_seconds, partial(engine.generate, prompts, **asked))
    memory = torch.ones(_READ_NBYTES // 4)
    calls["read"] = partial(_seconds, memory.sum)
    return interleave(calls, rounds)


def weight_nbytes(model: Any) -> int:
    """Return the bytes of the weights of linear layers, which a step reads."""
    layers = [one for one in model.modules() if hasattr(one, "weight") and not isinstance(one, torch.nn.Embedding)]
    grouped = sum(one.grouped.nbytes for one in layers if hasattr(one, "grouped"))
    plain = (one.weight for one in layers if not hasattr(one, "grouped"))
    return int(grouped + sum(one.nbytes for one in plain if one.dim() > 1))


def _seconds(run: Callable[[], object]) -> float:
    start = thread_time()
    run()
    return thread_time() - start


def figures(seconds: dict[str, list[float]], batch: int, tokens: int, read: int) -> tuple[str, ...]:
    """Return both speeds, and how they compare: medians, best, and without the prompts; and the share of reading."""
    typical = {name: median(each) for name, each in seconds.items()}
    best = {name: min(each) for name, each in seconds.items()}
    ours, module = f"ours {tokens}", f"module {tokens}"
    steps = {one: best[f"{one} {tokens}"] - best[f"{one} 1"] for one in ("ours", "module")}
    return (
        *(f"{batch * tokens / typical[name]:.0f}" for name in (ours, module)),
        f"{typical[module] / typical[ours]:.2f}",
        f"{best[module] / best[ours]:.2f}",
        f"{steps['module'] / steps['ours']:.2f}",
        f"{read * (tokens - 1) / steps['ours'] * best['read'] / _READ_NBYTES:.2f}",
    )
