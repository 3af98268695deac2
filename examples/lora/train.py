"""Train LoRA adapters of PEFT on a frozen language model whose parameters are sharded: ZeRO stage 3.

    polyaccel run --ranks 2 examples/lora/train.py --model path/or/hub-id

Without arguments it adapts a tiny Llama with random weights, so that it runs without a download.
"""

from __future__ import annotations

import argparse

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import polyaccel
from polyaccel.torch.data import RepeatingLoader

CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": 3},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", help="a folder or a Hub id (default: a tiny Llama with random weights)")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", help="a folder for the adapters, which PeftModel.from_pretrained loads")
    args = parser.parse_args()

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    tiny = LlamaConfig(vocab_size=256, **sizes)
    base = LlamaForCausalLM(tiny) if args.model is None else AutoModelForCausalLM.from_pretrained(args.model)
    model = get_peft_model(base, LoraConfig(r=8))
    model.print_trainable_parameters()
    data = [torch.arange(row, row + 32) % base.config.vocab_size for row in range(64)]  # counting is easy to learn

    engine, _, loader, _ = polyaccel.initialize(model=model, training_data=data, config=CONFIG)
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
    engine.destroy()


if __name__ == "__main__":
    main()
