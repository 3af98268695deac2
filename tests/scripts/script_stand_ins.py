"""Tiny models, tokenizers and data, written where a script looks for them. Everything is drawn with a fixed seed."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

STAND_INS: dict[str, Callable[[Path], None]] = {}
CHAT = (
    "{% for message in messages %}<|start_header_id|>{{ message['role'] }}<|end_header_id|>\n\n"
    "{{ message['content'] }}<|eot_id|>{% endfor %}"
)
"""A template of Llama 3's form, whose marks EAGLE looks for."""
WORDS = "the a small large red blue model rank loss step data house tree river runs reads writes sees finds keeps"


def stand_in(function: Callable[[Path], None]) -> Callable[[Path], None]:
    """Give a stand-in its name."""
    STAND_INS[function.__name__] = function
    return function


def make(name: str, folder: Path) -> None:
    """Write a stand-in into the folder that a script starts in. `NAME:ARGUMENT` gives it an argument."""
    kind, _, argument = name.partition(":")
    if argument:
        WITH_ARGUMENT[kind](folder, argument)
    else:
        STAND_INS[kind](folder)


def sentence(generator: random.Random, words: int = 8) -> str:
    """Drawn words."""
    return " ".join(generator.choice(WORDS.split()) for _ in range(words))


@stand_in
def enwik8(folder: Path) -> None:
    """A small text in place of the first bytes of Wikipedia."""
    generator = random.Random(3)
    text = " ".join(sentence(generator) for _ in range(200)).encode()[:8000]
    (folder / "data").mkdir(exist_ok=True)
    with gzip.open(folder / "data" / "enwik8.gz", "wb") as file:
        file.write(text)


def model(folder: Path, kind: str) -> None:
    """A model of transformers with a tokenizer, in the folder `stand_in_KIND`. `NAME=KIND` gives the folder's name."""
    import torch
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    generator = random.Random(5)
    name, _, other = kind.partition("=")
    place = folder / f"stand_in_{name}"
    kind = other or name
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    special = ["<pad>", "<s>", "</s>", "<unk>", "<mask>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    raw.train_from_iterator([sentence(generator) for _ in range(100)], trainer)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=raw,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        mask_token="<mask>",
        model_max_length=64,
    )
    if name == "llama3":
        tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(place)
    torch.manual_seed(11)
    config = _config(transformers, kind)
    built = getattr(transformers, config.architectures[0])(config)
    built.save_pretrained(place)


def _config(transformers: Any, kind: str) -> Any:
    shared: dict[str, Any] = {"vocab_size": 320, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    if kind in ("llama", "llama3"):
        return transformers.LlamaConfig(
            hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
            max_position_embeddings=256, architectures=["LlamaForCausalLM"], **shared,
        )  # fmt: skip
    if kind == "opt":
        return transformers.OPTConfig(
            hidden_size=32, ffn_dim=48, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=128,
            word_embed_proj_dim=32, architectures=["OPTForCausalLM"], **shared,
        )  # fmt: skip
    if kind == "gpt2":
        return transformers.GPT2Config(
            n_embd=32, n_layer=2, n_head=4, n_positions=128, architectures=["GPT2LMHeadModel"], **shared
        )
    if kind == "neox":
        return transformers.GPTNeoXConfig(
            hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            max_position_embeddings=256, architectures=["GPTNeoXForCausalLM"], **shared,
        )  # fmt: skip
    if kind == "qwen2":
        return transformers.Qwen2Config(
            hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            max_position_embeddings=256, architectures=["Qwen2ForCausalLM"], **shared,
        )  # fmt: skip
    if kind == "t5":
        return transformers.T5Config(
            d_model=32, d_ff=48, d_kv=8, num_layers=2, num_heads=4, decoder_start_token_id=0,
            architectures=["T5ForConditionalGeneration"], vocab_size=320, pad_token_id=0, eos_token_id=2,
        )  # fmt: skip
    if kind == "deepseek":
        return transformers.DeepseekV2Config(
            hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=4, n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2, n_group=1,
            topk_group=1, first_k_dense_replace=1, kv_lora_rank=8, q_lora_rank=None, qk_nope_head_dim=8,
            qk_rope_head_dim=4, v_head_dim=8, topk_method="greedy", architectures=["DeepseekV2ForCausalLM"], **shared,
        )  # fmt: skip
    if kind == "mixtral":
        return transformers.MixtralConfig(
            hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
            num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=256,
            architectures=["MixtralForCausalLM"], **shared,
        )  # fmt: skip
    if kind == "bert":
        return transformers.BertConfig(
            vocab_size=320, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            architectures=["BertForSequenceClassification"],
        )  # fmt: skip
    if kind == "roberta":
        return transformers.RobertaConfig(
            vocab_size=320, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            pad_token_id=0, architectures=["RobertaForMaskedLM"],
        )  # fmt: skip
    raise KeyError(f"no stand-in model of this name: {kind}")


@stand_in
def alpaca(folder: Path) -> None:
    """Instructions as in Stanford's Alpaca."""
    generator = random.Random(7)
    rows = [
        {
            "instruction": sentence(generator),
            "input": sentence(generator, 3) if n % 2 else "",
            "output": sentence(generator),
        }
        for n in range(32)
    ]
    (folder / "alpaca.json").write_text(json.dumps(rows), encoding="utf-8")


@stand_in
def sharegpt(folder: Path) -> None:
    """Conversations as in ShareGPT."""
    generator = random.Random(8)
    rows = [
        {
            "id": f"row{n}",
            "conversations": [
                {"from": who, "value": sentence(generator, 6)} for who in ("human", "gpt", "human", "gpt")
            ],
        }
        for n in range(16)
    ]
    (folder / "sharegpt.json").write_text(json.dumps(rows), encoding="utf-8")


@stand_in
def sharegpt_qwen(folder: Path) -> None:
    """Conversations between a user and an assistant, and the marks of Qwen's format in the tokenizer."""
    generator = random.Random(8)
    rows = [
        {
            "id": f"row{n}",
            "conversations": [{"from": who, "value": sentence(generator, 3)} for who in ("user", "assistant")],
        }
        for n in range(16)
    ]
    (folder / "sharegpt.json").write_text(json.dumps(rows), encoding="utf-8")


@stand_in
def code_cache(folder: Path) -> None:
    """A data set of token numbers, as CodeT5 keeps it."""
    import datasets

    generator = random.Random(10)
    rows = [[generator.randrange(5, 300) for _ in range(16)] for _ in range(16)]
    columns = {"input_ids": rows, "attention_mask": [[1] * 16] * 16, "labels": [row[:8] for row in rows]}
    datasets.Dataset.from_dict(columns).save_to_disk(folder / "cache")


def hub_rows(path: str) -> list[dict[str, Any]]:
    """Rows with the columns of a data set of the hub."""
    generator = random.Random(9)
    rows: list[dict[str, Any]] = []
    for number in range(32):
        asked = {"role": "user", "content": sentence(generator, 4)}
        good, bad = ({"role": "assistant", "content": sentence(generator, words)} for words in (5, 3))
        rows.append(
            {"messages": [asked, good]}
            if path.endswith("Capybara")
            else {"chosen": [asked, good], "rejected": [asked, bad]}
            if "ultrafeedback" in path
            else {"dialogue": sentence(generator), "summary": sentence(generator, 4), "id": str(number)}
            if path == "samsum"
            else {"text": sentence(generator, 20), "label": generator.randrange(2)}
            if "imdb" in path
            else {"text": sentence(generator, 20)}
        )
    return rows


@stand_in
def zero_config(folder: Path) -> None:
    """A DeepSpeed config that a user gives, for scripts that come without one."""
    auto = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
    optimizer = {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")}
    config = {**dict.fromkeys(auto, "auto"), "optimizer": optimizer, "zero_optimization": {"stage": 2}}
    (folder / "ds.json").write_text(json.dumps(config), encoding="utf-8")


@stand_in
def text(folder: Path) -> None:
    """A file of lines."""
    generator = random.Random(13)
    lines = [sentence(generator, 12) for _ in range(60)]
    (folder / "train.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


@stand_in
def yi_data(folder: Path) -> None:
    """Prompts and answers, as Yi's example data set has them."""
    generator = random.Random(14)
    (folder / "yi_data" / "data").mkdir(parents=True)
    for part in ("train", "eval"):
        rows = [
            {"prompt": f"Human: {sentence(generator, 3)} Assistant:", "chosen": sentence(generator, 4)}
            for _ in range(16)
        ]
        file = folder / "yi_data" / "data" / f"{part}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


@stand_in
def images(folder: Path) -> None:
    """Pictures of noise in a folder of one class."""
    for number in range(16):
        _picture(folder / "images" / "one" / f"{number}.png", number)


@stand_in
def pictures(folder: Path) -> None:
    """Pictures of noise in two classes."""
    for number in range(16):
        _picture(folder / "pictures" / f"class{number % 2}" / f"{number}.png", number)
    (folder / "out").mkdir(exist_ok=True)


@stand_in
def videos(folder: Path) -> None:
    """A table of videos with their labels; the files themselves hold nothing."""
    (folder / "videos").mkdir()
    lines = []
    for number in range(16):
        (folder / "videos" / f"{number}.mp4").write_bytes(b"drawn" * 300)
        lines.append(f"videos/{number}.mp4 {number % 4}")
    for part in ("train", "val", "test"):
        (folder / "videos" / f"{part}.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (folder / "out").mkdir()


@stand_in
def captioned(folder: Path) -> None:
    """Pictures, each with a caption."""
    generator = random.Random(6)
    for number in range(16):
        _picture(folder / "captioned" / f"{number}.png", number)
        (folder / "captioned" / f"{number}.txt").write_text(sentence(generator, 4), encoding="utf-8")


def _picture(file: Path, seed: int) -> None:
    import numpy as np
    from PIL import Image

    file.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (24, 24, 3), dtype=np.uint8)).save(file)


@stand_in
def dalle_vae(folder: Path) -> None:
    """A VAE as DALLE-pytorch's train_vae saves it: the shapes of its DiscreteVAE, drawn."""
    import subprocess
    import sys

    code = (
        "import sys, types, torch\n"
        "from unittest.mock import MagicMock\n"
        "for name in ('taming', 'taming.models', 'taming.models.vqgan', 'pkg_resources', 'youtokentome'):\n"
        "    sys.modules[name] = MagicMock()\n"
        "sys.path.insert(0, '.')\n"
        "torch.manual_seed(4)\n"
        "from dalle_pytorch.dalle_pytorch import DiscreteVAE\n"
        "facts = dict(image_size=16, num_layers=2, num_tokens=16, codebook_dim=8, hidden_dim=8, num_resnet_blocks=1)\n"
        "torch.save({'hparams': facts, 'weights': DiscreteVAE(**facts).state_dict()}, 'vae.pt')\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=folder, check=True)


@stand_in
def token_shards(folder: Path) -> None:
    """Token numbers in the files of numpy arrays."""
    import numpy as np

    place = folder / "out" / "ts_train"
    place.mkdir(parents=True)
    np.save(place / "shard_0.npy", np.random.default_rng(2).integers(0, 128, 4000).astype(np.uint16))


@stand_in
def chat(folder: Path) -> None:
    """Prompts with a chosen and a rejected answer, where DeepSpeed-Chat reads its own files."""
    generator = random.Random(12)
    place = folder.parents[1] / "data"
    place.mkdir(exist_ok=True)
    for part in ("train", "eval"):
        rows = [
            {
                "prompt": f"Human: {sentence(generator, 4)} Assistant:",
                "chosen": sentence(generator, 5),
                "rejected": sentence(generator, 3),
            }
            for _ in range(40)
        ]
        (place / f"{part}.json").write_text(json.dumps(rows), encoding="utf-8")


@stand_in
def critic(folder: Path) -> None:
    """A reward model as DeepSpeed-Chat's second step saves it."""
    import torch

    model(folder, "opt")
    (folder / "stand_in_opt").rename(folder / "stand_in_critic")
    model(folder, "opt")
    import transformers

    built = transformers.AutoModel.from_pretrained(folder / "stand_in_critic")
    states = {f"rwtranrsformer.{name}": value.clone() for name, value in built.state_dict().items()}
    states["v_head.weight"] = torch.linspace(-0.3, 0.3, 32).reshape(1, 32)
    torch.save(states, folder / "stand_in_critic" / "pytorch_model.bin")


WITH_ARGUMENT: dict[str, Callable[[Path, str], None]] = {"model": model}
