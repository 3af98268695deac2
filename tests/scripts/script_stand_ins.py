"""Tiny models, tokenizers and data, written where a script looks for them. Everything is drawn with a fixed seed."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from script_models import model, sentence

STAND_INS: dict[str, Callable[[Path], None]] = {}


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


@stand_in
def enwik8(folder: Path) -> None:
    """A small text in place of the first bytes of Wikipedia."""
    generator = random.Random(3)
    text = " ".join(sentence(generator) for _ in range(200)).encode()[:8000]
    (folder / "data").mkdir(exist_ok=True)
    with gzip.open(folder / "data" / "enwik8.gz", "wb") as file:
        file.write(text)


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
def alpaca_parquet(folder: Path) -> None:
    """The same rows as a table of parquet."""
    import datasets

    alpaca(folder)
    rows = json.loads((folder / "alpaca.json").read_text(encoding="utf-8"))
    datasets.Dataset.from_list(rows).to_parquet(folder / "alpaca.parquet")


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


def _pair(generator: random.Random) -> dict[str, str]:
    return {f"sentence{which}": sentence(generator, 6) for which in (1, 2)}


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
            else {"prompt": [asked], "completion": [good if number % 2 else bad], "label": bool(number % 2)}
            if "kto" in path
            else {"prompt": [asked], "solution": good["content"]}
            if path.endswith("DeepMath-103K")
            else {"question": sentence(generator, 4), "answer": good["content"]}
            if "warren" in path
            else {**_pair(generator), "label": number % 2, "idx": number}
            if path.endswith("glue")
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
def bare_config(folder: Path) -> None:
    """A DeepSpeed config for scripts with an optimizer of their own."""
    zero_config(folder)
    config = json.loads((folder / "ds.json").read_text(encoding="utf-8"))
    del config["optimizer"]
    config |= {"train_micro_batch_size_per_gpu": 4, "zero_allow_untested_optimizer": True}
    config |= {"train_batch_size": "auto", "gradient_accumulation_steps": 1, "gradient_clipping": 1.0}
    (folder / "ds.json").write_text(json.dumps(config), encoding="utf-8")


@stand_in
def rewards(folder: Path) -> None:
    """A reward that any answer has, by the letters in it."""
    code = (
        "def letters(completions, **kwargs):\n"
        "    return [sum(map(ord, one[0]['content'])) % 7 / 7.0 for one in completions]\n"
    )
    (folder / "drawn_rewards.py").write_text(code, encoding="utf-8")


@stand_in
def pets(folder: Path) -> None:
    """Pictures of noise with names as in the Oxford-IIIT Pet data set."""
    for number in range(20):
        _picture(folder / "pets" / f"{('beagle', 'birman', 'pug')[number % 3]}_{number}.jpg", number)


@stand_in
def lines(folder: Path) -> None:
    """Texts as lines of JSON."""
    generator = random.Random(15)
    rows = [json.dumps({"text": sentence(generator, 12)}) for _ in range(40)]
    (folder / "lines.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")


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


@stand_in
def speech(folder: Path) -> None:
    """WeNet's list of recordings, the characters of their texts, and a folder for the model."""
    generator = random.Random(12)
    (folder / "speech").mkdir()
    (folder / "out").mkdir()
    rows = [{"key": f"a{n}", "wav": f"a{n}.wav", "txt": sentence(generator, 2)} for n in range(16)]
    (folder / "speech" / "data.list").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    symbols = ["<blank>", "<unk>", "▁", *"abcdefghijklmnopqrstuvwxyz", "<sos/eos>"]
    lines = "".join(f"{symbol} {number}\n" for number, symbol in enumerate(symbols))
    (folder / "speech" / "lang_char.txt").write_text(lines, encoding="utf-8")


@stand_in
def shop(folder: Path) -> None:
    """Users, the items that they took one after another, and codes of items, as LC-Rec keeps them."""
    generator = random.Random(16)
    users, items = range(6), range(16)
    taken = {user: generator.sample(items, 7) for user in users}
    codes = {item: [f"<a_{item % 3}>", f"<b_{item % 4}>", f"<c_{item}>"] for item in items}
    facts = {item: {"title": sentence(generator, 3), "description": sentence(generator, 6)} for item in items}
    wishes = {user: [sentence(generator, 4) for _ in range(2)] for user in users}
    asked = {
        user: {"querys": [sentence(generator, 4) for _ in range(2)], "item": row[-3], "inters": row[:-3]}
        for user, row in taken.items()
    }
    preferences = {"user_explicit_preference": wishes, "user_vague_intention": {"train": asked, "test": asked}}
    (folder / "shop").mkdir()
    for part, table in (("inter", taken), ("index", codes), ("item", facts), ("user", preferences)):
        (folder / "shop" / f"shop.{part}.json").write_text(json.dumps(table), encoding="utf-8")


WITH_ARGUMENT: dict[str, Callable[[Path, str], None]] = {"model": model}
