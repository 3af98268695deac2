"""The training that is tuned: `train.py CONFIG SIZE`, the byte-level GPT of `bench.steps`, for as long as it may."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

import polyaccel
from bench.steps.cases import SHAPES
from bench.steps.model import Gpt, draw_batch, load_corpus

_MOST_STEPS = 1000


def main(argv: list[str]) -> None:
    torch.set_num_threads(1)
    corpus = load_corpus()
    engine, *_ = polyaccel.initialize(model=Gpt(SHAPES[argv[1]]), config=argv[0])
    rank, micro_batch = engine.communicator.rank, engine.train_micro_batch_size_per_gpu()
    for step in range(_MOST_STEPS * engine.gradient_accumulation_steps()):
        tokens, targets = draw_batch(corpus, step, rank, micro_batch)
        engine.backward(engine(tokens, targets))
        engine.step()


if __name__ == "__main__":
    main(sys.argv[1:])
