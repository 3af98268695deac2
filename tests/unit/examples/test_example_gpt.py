"""The parts of examples/gpt: model, corpus, sample."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from example_modules import EXAMPLES, example_modules

from polyaccel import PolyaccelError, comm


@pytest.fixture(scope="module")
def gpt() -> Iterator[SimpleNamespace]:
    with example_modules("gpt") as modules:
        yield modules


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """A small standard library, with parts that are not the library's own."""
    root = tmp_path / "lib"
    for number in range(60):
        file = root / ("package" if number % 2 else ".") / f"module_{number}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"name = {number}\n" * 5)
    for foreign in ("site-packages/other.py", "test/test_it.py", "data.txt"):
        (root / foreign).parent.mkdir(parents=True, exist_ok=True)
        (root / foreign).write_text("foreign")
    return root


# The model.


@pytest.mark.parametrize(("size", "millions"), [("tiny", 0.1), ("mini", 3.3), ("small", 10.8), ("medium", 28.6)])
def test_sizes_are_what_the_help_says(gpt: SimpleNamespace, size: str, millions: float) -> None:
    with torch.device("meta"):
        model = gpt.model.Gpt(gpt.model.SHAPES[size])
    assert model.numel / 1e6 == pytest.approx(millions, abs=0.06)


def test_no_byte_sees_the_future(gpt: SimpleNamespace) -> None:
    torch.manual_seed(0)
    model = gpt.model.Gpt(gpt.model.SHAPES["tiny"]).eval()
    tokens = torch.randint(256, (1, 20))
    changed = tokens.clone()
    changed[0, 12:] += 1
    before, after = model(tokens), model(changed % 256)
    torch.testing.assert_close(before[:, :12], after[:, :12], rtol=0, atol=1e-6)
    assert not torch.allclose(before[:, 12:], after[:, 12:], atol=1e-3)


def test_generation_is_repeatable_and_goes_past_the_context(gpt: SimpleNamespace) -> None:
    torch.manual_seed(0)
    shape = gpt.model.SHAPES["tiny"]
    model = gpt.model.Gpt(shape).eval()

    def draw(prompt: bytes) -> bytes:
        return bytes(gpt.model.generate(model, prompt, 70, context=shape.context, device=torch.device("cpu")))

    assert len(draw(b"def ")) == 70 > shape.context
    assert draw(b"def ") == draw(b"def ") != draw(b"class ")


# The config.


@pytest.mark.parametrize("example", ["gpt", "gpt_jax"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 7, 8, 24])
def test_any_number_of_ranks_can_share_a_batch(example: str, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if example == "gpt_jax":
        pytest.importorskip("jax")
    monkeypatch.setattr(comm, "get_world_size", lambda: ranks)
    run = {"steps": 10, "precision": "fp32"}
    file = EXAMPLES / example / "config.json"
    own = json.loads(file.read_text(encoding="utf-8"))["train_batch_size"]
    with example_modules(example) as modules:
        config_of = modules.train.config_of
        batch = config_of(SimpleNamespace(config=None), run, "runs")["train_batch_size"]
        assert own <= batch < own + ranks
        assert batch % ranks == 0
        assert config_of(SimpleNamespace(config=str(file)), run, "runs")["train_batch_size"] == own


# The corpus.


def test_every_file_of_the_library_is_in_one_part(gpt: SimpleNamespace, library: Path) -> None:
    corpus = gpt.corpus.open_corpus(library)
    texts = sorted(
        file.read_bytes() for file in library.rglob("*.py") if {"test", "site-packages"}.isdisjoint(file.parts)
    )
    parts = [text.split(b"\0")[:-1] for text in (corpus.training, corpus.validation)]
    assert sorted([*parts[0], *parts[1]]) == texts
    assert 0 < len(parts[1]) < len(parts[0])
    assert gpt.corpus.open_corpus(library) == corpus
    (library / "zzz.py").write_text("new")
    after = gpt.corpus.open_corpus(library)
    assert after.digest != corpus.digest
    assert set(parts[0]) <= set(after.training.split(b"\0")), "a file's part depends on its name alone"


def test_an_empty_library_is_an_error(gpt: SimpleNamespace, tmp_path: Path) -> None:
    with pytest.raises(PolyaccelError) as caught:
        gpt.corpus.open_corpus(tmp_path)
    assert caught.value.value == str(tmp_path)


def test_windows_cover_the_bytes_and_targets_are_the_next_ones(gpt: SimpleNamespace) -> None:
    windows = gpt.corpus.Windows(bytes(range(25)), 8)
    assert len(windows) == 3
    tokens, targets = zip(*(windows[index] for index in range(3)), strict=True)
    assert torch.cat(tokens).tolist() == list(range(24))
    assert torch.cat(targets).tolist() == list(range(1, 25))
    with pytest.raises(IndexError):
        windows[3]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_ranks_validate_on_equally_many_windows(gpt: SimpleNamespace, world_size: int) -> None:
    windows = gpt.corpus.Windows(bytes(1001), 10)
    shares = [windows.share(12, rank, world_size) for rank in range(world_size)]
    assert {len(share) for share in shares} == {12 // world_size}
    together = sorted(index for share in shares for index in share)
    assert together == windows.share(12, 0, 1)
    assert (together[0], together[-1]) == (0, 99)
