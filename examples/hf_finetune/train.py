"""Fine-tune a causal language model of transformers in a plain loop.

    polyaccel run --ranks 2 examples/hf_finetune/train.py --model path/or/hub-id --text corpus.txt

Without arguments it trains a tiny Llama on its own source, so that it runs without a download. `trainer.py` does the
same by the Trainer of transformers.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedModel

import polyaccel
from polyaccel.torch.data import RepeatingLoader

CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 3},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", help="a folder or a Hub id (default: a tiny Llama with random weights)")
    parser.add_argument("--text", type=Path, default=Path(__file__), help="what to train on (default: this file)")
    parser.add_argument("--length", type=int, default=64, help="tokens of a sequence")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", type=Path, help="a folder for the trained model, which from_pretrained loads")
    args = parser.parse_args()

    polyaccel.init_distributed()
    model, tokens = load(args.model, args.text.read_text(encoding="utf-8"))
    rows = torch.tensor(tokens[: len(tokens) // args.length * args.length]).view(-1, args.length)
    engine, _, loader, _ = polyaccel.initialize(model=model, training_data=list(rows), config=CONFIG)
    batches = iter(RepeatingLoader(loader))
    for step in range(1, args.steps + 1):
        batch = next(batches).to(engine.device)
        loss = engine(input_ids=batch, labels=batch).loss
        engine.backward(loss)
        engine.step()
        if engine.communicator.rank == 0 and (step % 10 == 0 or step == args.steps):
            print(f"step {step}: loss {loss.item():.4f}", flush=True)
    if args.out is not None:
        weights = engine.module_state_dict()  # every rank asks: at stage 3 they are gathered
        if engine.communicator.rank == 0:
            model.save_pretrained(args.out, state_dict=weights)
            if args.model is not None:
                AutoTokenizer.from_pretrained(args.model).save_pretrained(args.out)
    engine.destroy()


def load(name: str | None, text: str) -> tuple[PreTrainedModel, list[int]]:
    """The model and the tokens of a text; without a name a tiny model of bytes."""
    if name is not None:
        tokenizer = AutoTokenizer.from_pretrained(name)
        return AutoModelForCausalLM.from_pretrained(name), tokenizer(text)["input_ids"]
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes)), list(text.encode())


if __name__ == "__main__":
    main()
