"""One of Accelerate's own packaged test scripts, with stand-ins for what it would download and for the GPU it expects.

`packaged_job.py NAME FOLDER [arguments of the script]`: FOLDER has a tiny model and its tokenizer (`save_model`), and
the configs zero2.json and zero3.json for the script that names such files of Accelerate's repository. The data set
GLUE/MRPC is a drawn one, its metric is computed here, and ranks use gloo.
"""

from __future__ import annotations

import random
import runpy
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import accelerate
import datasets
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast, set_seed

WORDS = [f"w{number}" for number in range(60)]
SCRIPTS = "accelerate.test_utils.scripts"


def save_model(folder: Path) -> None:
    """A model whose last layer is nearly zero, so that the scripts' tiny learning rates change what it answers."""
    known = {word: number for number, word in enumerate(["[PAD]", "[UNK]", *WORDS])}
    raw = Tokenizer(models.WordLevel(known, unk_token="[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="[PAD]", unk_token="[UNK]")
    tokenizer.save_pretrained(folder)
    set_seed(3)
    shape = BertConfig(vocab_size=len(known), hidden_size=64, num_hidden_layers=2, num_attention_heads=2,
                       intermediate_size=64, max_position_embeddings=32, num_labels=2,
                       hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)  # fmt: skip
    model = BertForSequenceClassification(shape)
    with torch.no_grad():
        model.classifier.weight.mul_(0.01)
        model.classifier.bias.copy_(torch.tensor([0.008, 0.0]))
    model.save_pretrained(folder)


def drawn(*named: Any, **options: Any) -> datasets.DatasetDict:
    """Pairs of sentences; most have the label 1, and the model begins with 0."""
    draw = random.Random(7)
    splits = {}
    for split, count in (("train", 320), ("validation", 48)):
        rows = {name: [" ".join(draw.choices(WORDS, k=6)) for _ in range(count)] for name in ("sentence1", "sentence2")}
        labels = [int(draw.random() < 0.8) for _ in range(count)]
        splits[split] = datasets.Dataset.from_dict({**rows, "label": labels, "idx": list(range(count))})
    return datasets.DatasetDict(splits)


class Metric:
    """The share of right predictions."""

    def __init__(self) -> None:
        self.right = self.count = 0

    def add_batch(self, predictions: torch.Tensor, references: torch.Tensor) -> None:
        self.right += int((predictions == references).sum())
        self.count += len(references)

    def compute(self) -> dict[str, float]:
        found = {"accuracy": self.right / self.count}
        self.right = self.count = 0
        return found


def meet_over_gloo() -> None:
    """Under DeepSpeed Accelerate supports the backends of GPUs only."""
    prepare = accelerate.PartialState._prepare_backend
    accelerate.PartialState._prepare_backend = lambda self, cpu=False, sagemaker_dp=False, backend=None: prepare(
        self, cpu, sagemaker_dp, backend or "gloo"
    )


def main() -> None:
    name, folder, *arguments = sys.argv[1:]
    evaluate = ModuleType("evaluate")
    evaluate.load = lambda *named: Metric()  # type: ignore[attr-defined]
    sys.modules["evaluate"] = evaluate
    datasets.load_dataset = drawn
    meet_over_gloo()
    sys.argv[1:] = arguments
    if name.endswith("test_ds_multiple_model"):
        script = import_module(f"{SCRIPTS}.{name}")
        script.ds_config_file = {stage: f"{folder}/{stage}.json" for stage in ("zero2", "zero3")}
        script.main()
    else:
        runpy.run_module(f"{SCRIPTS}.{name}", run_name="__main__")


if __name__ == "__main__":
    main()
