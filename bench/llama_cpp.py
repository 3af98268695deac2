"""Tokens a second of one sequence and of llama.cpp, with the same weights of a Llama, by one thread.

It needs llama.cpp's `xllamacpp` and `gguf` in an environment of their own, which has no torch:

    .venv/bin/python -m bench.llama_cpp export FOLDER 29m
    for round in 1 2 3; do
      .venv/bin/python -m bench.llama_cpp ours FOLDER
      OTHER/bin/python bench/llama_cpp.py theirs FOLDER
    done

Times are the processor's, of one process: that of 65 new tokens without that of one, and of a prompt of 64.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from time import process_time
from typing import Any

_PROMPT, _NEW = 64, 64
_TIMES = 5


def export(folder: Path, size: str) -> None:
    """Write the weights of a new Llama, and its sizes."""
    import numpy as np

    from bench.cases.generation import make_engine

    engine = make_engine("llama", size, "float32")
    sizes = engine.module.config.to_dict()
    state = {name: value.bfloat16().float().numpy() for name, value in engine.module.state_dict().items()}
    folder.mkdir(parents=True, exist_ok=True)
    np.savez(folder / "weights.npz", **state)
    (folder / "sizes.json").write_text(json.dumps({**sizes, "size": size}, default=str))


def ours(folder: Path) -> None:
    """Print the speeds of our decoder."""
    import numpy as np
    import torch

    from bench.cases.generation import make_engine

    torch.set_num_threads(1)
    weights = {name: torch.from_numpy(value) for name, value in np.load(folder / "weights.npz").items()}
    size = json.loads((folder / "sizes.json").read_text())["size"]
    for dtype in ("bfloat16", "int8", "int4"):
        from transformers import LlamaForCausalLM

        import polyaccel

        model = LlamaForCausalLM(make_engine("llama", size, "float32").module.config).bfloat16()
        model.load_state_dict(weights)
        engine = polyaccel.init_inference(model, dtype=dtype if dtype.startswith("int") else None, group_size=32)
        prompt = torch.arange(_PROMPT)[None] * 7 % 250 + 3

        def run(count: int, engine: Any = engine, prompt: Any = prompt) -> list[int]:
            found: list[int] = engine.generate(prompt, max_new_tokens=count, do_sample=False)[0, _PROMPT:].tolist()
            return found

        _report("ours", dtype, run)


def theirs(folder: Path) -> None:
    """Print the speeds of llama.cpp, whose files are made where they are missing."""
    import xllamacpp

    for name in ("BF16", "Q8_0", "Q4_0"):
        path = folder / f"{name}.gguf"
        if not path.exists():
            _write(folder, path, name)
        params = xllamacpp.CommonParams()
        params.model.path = str(path)
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
        params.n_ctx, params.n_parallel, params.warmup, params.cache_prompt = 256, 1, True, False
        server = xllamacpp.Server(params)
        prompt = [one * 7 % 250 + 3 for one in range(_PROMPT)]

        def run(count: int, server: Any = server, prompt: Any = prompt) -> list[int]:
            asked = {"prompt": prompt, "n_predict": count, "temperature": 0.0, "ignore_eos": True}
            found = server.handle_completions({**asked, "cache_prompt": False, "return_tokens": True})
            tokens: list[int] = found.get("tokens", [])
            return tokens

        _report("theirs", name, run)


def _report(whose: str, kind: str, run: Callable[[int], list[int]]) -> None:
    tokens = run(_NEW + 1)
    best = {}
    for count in (_NEW + 1, 1):
        seconds = []
        for _ in range(_TIMES):
            start = process_time()
            run(count)
            seconds.append(process_time() - start)
        best[count] = min(seconds)
    step = (best[_NEW + 1] - best[1]) / _NEW
    print(f"{whose}, {kind}, {1 / step:.0f} tokens/s, prompt {best[1] * 1e3:.1f} ms, {tokens[:8]}", flush=True)


def _write(folder: Path, path: Path, name: str) -> None:
    """Convert the weights to a file of llama.cpp. Its rotary positions turn neighbours, so rows of heads are sorted."""
    import gguf
    import numpy as np

    sizes, weights = json.loads((folder / "sizes.json").read_text()), np.load(folder / "weights.npz")
    writer = gguf.GGUFWriter(str(path), "llama")
    width, heads, layers = sizes["hidden_size"], sizes["num_attention_heads"], sizes["num_hidden_layers"]
    writer.add_context_length(1024)
    writer.add_embedding_length(width)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(sizes["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(heads)
    writer.add_rope_dimension_count(width // heads)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(sizes["rms_norm_eps"])
    writer.add_vocab_size(sizes["vocab_size"])
    writer.add_tokenizer_model("llama")
    writer.add_token_list([f"<0x{one:02X}>".encode() for one in range(sizes["vocab_size"])])
    writer.add_token_scores([0.0] * sizes["vocab_size"])
    writer.add_token_types([gguf.TokenType.BYTE] * sizes["vocab_size"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    names = {
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    kind = gguf.GGMLQuantizationType[name]
    for full, value in weights.items():
        parts = full.removeprefix("model.").removesuffix(".weight").split(".", 2)
        theirs = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}.get(parts[0])
        theirs = theirs or f"blk.{parts[1]}.{names[parts[2]]}"
        rows = np.asarray(value, np.float32)
        if theirs.endswith(("attn_q", "attn_k")):
            rows = rows.reshape(heads, 2, width // heads // 2, width).swapaxes(1, 2).reshape(rows.shape)
        if rows.ndim > 1 and theirs != "token_embd":
            writer.add_tensor(f"{theirs}.weight", gguf.quants.quantize(rows, kind), raw_dtype=kind)
        else:
            writer.add_tensor(f"{theirs}.weight", rows)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    verb, place, *more = sys.argv[1:]
    verbs: dict[str, Callable[..., None]] = {"export": export, "ours": ours, "theirs": theirs}
    verbs[verb](Path(place), *more)
