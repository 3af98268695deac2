"""Teach a small Llama to sort digits by reinforcement learning (GRPO): sample answers, check them, learn from the best.

    polyaccel run --ranks 2 examples/rl/train.py

One engine generates and trains. `"generation": {"exact": true}` in config.json gives sampled tokens the
log-probabilities that training computes, bit for bit. All that the run leaves is in runs/rl.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from task import LENGTH, START, VOCABULARY, draw_prompts, rewards
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import polyaccel
from polyaccel import PolyaccelError, TorchEngine, comm

ANSWERS = 16
"""Answers to each prompt, which are compared with each other."""
CLIP = 0.2


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=400, metavar="N", help="optimizer steps (default: 400)")
    parser.add_argument("--run-dir", default="runs/rl", metavar="DIR", help="default: runs/rl, or runs/rl-2, ...")
    args = parser.parse_args()
    try:
        polyaccel.init_distributed()
        train(args.steps, args.run_dir)
        comm.destroy_process_group()
    except PolyaccelError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def train(steps: int, run_dir: str) -> None:
    """The whole run. Collective."""
    folder, _ = polyaccel.begin_run(run_dir, {"steps": steps}, defaults={"steps": steps})
    config = json.loads(Path(__file__).with_name("config.json").read_text(encoding="utf-8"))
    config["scheduler"]["params"]["total_num_steps"] = steps
    torch.manual_seed(1)
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "max_position_embeddings": 16}
    tokens: dict[str, Any] = {"vocab_size": VOCABULARY, "bos_token_id": START, "eos_token_id": None}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **tokens))
    engine, *_ = polyaccel.initialize(model=model, config={**config, "run_dir": folder})
    prompts_of_a_step = engine.train_micro_batch_size_per_gpu() // ANSWERS
    generator = torch.Generator().manual_seed(comm.get_rank())  # other prompts on every rank
    torch.manual_seed(100 + comm.get_rank())  # and other draws
    with polyaccel.open_progress(steps) as progress:
        progress.say(
            f"{folder}: GRPO of a Llama with {model.num_parameters():,} parameters, {ANSWERS} answers a prompt"
        )
        for step in range(1, steps + 1):
            prompts = draw_prompts(prompts_of_a_step, generator).repeat_interleave(ANSWERS, 0).to(engine.device)
            sequences, sampled = roll_out(engine, prompts)
            begin = perf_counter()
            earned = rewards(prompts, sequences[:, -LENGTH:])
            differs = update(engine, sequences, sampled, earned)
            times = engine.rollout_times
            assert times is not None
            assert engine.metrics is not None
            took = {"rollout": times.generate_s, "hand-over": times.hand_over_s, "update": perf_counter() - begin}
            reward = mean_over_ranks(earned.mean())
            progress.step(engine.metrics)
            figures = {"reward": reward, "log_probability_difference": differs, "update_s": took["update"]}
            engine.monitor.write_events([(name, value, step) for name, value in figures.items()])
            if step % 50 == 0 or step in (1, steps):
                shares = ", ".join(f"{name} {value / sum(took.values()):.0%}" for name, value in took.items())
                progress.say(f"step {step}: reward {reward:.3f}; time: {shares}")
        progress.say(f"right answers: {accuracy(engine):.1%}; report: {folder}/report.html")
    engine.destroy()  # writes the report


def roll_out(engine: TorchEngine, prompts: Tensor) -> tuple[Tensor, Tensor]:
    """Sample an answer to each prompt. Returns whole sequences, and the log-probabilities of the sampled tokens."""
    asked: dict[str, Any] = {"do_sample": True, "min_new_tokens": LENGTH, "max_new_tokens": LENGTH}
    output = engine.generate(prompts, **asked, output_logits=True, return_dict_in_generate=True)
    return output.sequences, chosen(torch.stack(output.logits, 1), output.sequences)


def update(engine: TorchEngine, sequences: Tensor, sampled: Tensor, earned: Tensor) -> float:
    """Make answers likelier that earned more than the others to the same prompt (GRPO, arXiv 2402.03300, without its
    divergence). Returns the largest difference between log-probabilities of sampling and training. Collective."""
    groups = earned.view(-1, ANSWERS)
    spread = groups.std(1, keepdim=True) + 1e-4
    advantage = ((groups - groups.mean(1, keepdim=True)) / spread).view(-1, 1)
    learned = chosen(engine(input_ids=sequences, use_cache=False).logits[:, :-1], sequences)
    ratio = (learned - sampled).exp()
    loss = -torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage).mean()
    engine.backward(loss)
    engine.step()
    return float((learned.detach() - sampled).abs().max())


def chosen(logits: Tensor, sequences: Tensor) -> Tensor:
    """Return the log-probabilities of each sequence's last tokens, those of the answer."""
    answer = sequences[:, -LENGTH:, None]
    return logits[:, -LENGTH:].log_softmax(-1).gather(-1, answer)[..., 0]


def accuracy(engine: TorchEngine) -> float:
    """The part of new prompts whose likeliest answer is right. Collective."""
    prompts = draw_prompts(256, torch.Generator().manual_seed(10_000 + comm.get_rank())).to(engine.device)
    answers = engine.generate(prompts, do_sample=False, min_new_tokens=LENGTH, max_new_tokens=LENGTH)[:, -LENGTH:]
    return mean_over_ranks((rewards(prompts, answers) == 1).float().mean())


def mean_over_ranks(value: Tensor) -> float:
    mean = value.reshape(1).clone()
    comm.all_reduce(mean, op=comm.ReduceOp.AVG)
    return float(mean)


if __name__ == "__main__":
    sys.exit(main())
