"""A trained engine's checkpoint goes out as files of other tools, which read them, and comes back bit by bit."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from parity_models import drawn_from
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed import checkpoint as dcp

import polyaccel
from polyaccel.checkpoint import open_checkpoint
from polyaccel.checkpoint.convert.elements import as_numbers, converted, read
from polyaccel.cli.main import main
from polyaccel.comm.base import Communicator
from polyaccel.core.types import DType
from polyaccel.testkit.ranks.threads import run_threads

CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
    "zero_optimization": {"stage": 3},
}


class Tied(nn.Module):
    """An embedding whose weight is the head's too, a norm with buffers, and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.inner = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        return self.head(hidden + self.norm(self.inner(hidden)) + self.frozen(hidden))


def built(seed: int) -> nn.Module:
    with drawn_from(seed):
        return Tied()


def steps(engine: Any, count: int, first: int = 0) -> list[float]:
    losses = []
    for step in range(first, first + count):
        tokens = torch.arange(2) * 3 + step
        loss = nn.functional.cross_entropy(engine(tokens % 11), (tokens * 5) % 11)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    """A checkpoint that two ranks saved at stage 3 after three steps, and the model's state dict."""
    folder = tmp_path_factory.mktemp("trained")

    def job(communicator: Communicator) -> dict[str, torch.Tensor]:
        engine, *_ = polyaccel.initialize(model=built(0), config=CONFIG)
        steps(engine, 3)
        engine.save_checkpoint(str(folder))
        return {name: value.detach().clone() for name, value in engine.module_state_dict().items()}

    return folder, run_threads(2, job)[0]


def same(found: dict[str, torch.Tensor], state: dict[str, torch.Tensor]) -> None:
    assert set(found) == set(state) - {"head.weight"}  # tied: saved once, under its first name
    for name, value in found.items():
        assert torch.equal(value, state[name]), name
        assert value.dtype == state[name].dtype


def values(place: Path) -> dict[tuple[str, str], tuple[tuple[int, ...], DType, bytes]]:
    reader = open_checkpoint(place)
    return {
        (entry.fqn, entry.kind): (entry.shape, entry.dtype, read(reader, entry, 0, entry.numel).tobytes())
        for entry in reader.tensors()
    }


def test_safetensors_open_in_one_file(trained: Any, tmp_path: Path) -> None:
    folder, state = trained
    assert main(["ckpt", "export", str(folder), str(tmp_path / "out"), "--format", "safetensors"]) == 0
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]
    same(load_file(tmp_path / "out" / "model.safetensors"), state)
    assert b'"__metadata__":{"format":"pt"}' in (tmp_path / "out" / "model.safetensors").read_bytes()
    fresh = built(1)
    missing, unexpected = fresh.load_state_dict(load_file(tmp_path / "out" / "model.safetensors"), strict=False)
    assert (missing, unexpected) == (["head.weight"], [])
    assert torch.equal(fresh.get_parameter("head.weight"), state["head.weight"])


@pytest.mark.parametrize(("kind", "stem"), [("safetensors", "model"), ("bin", "pytorch_model")])
def test_several_files_have_an_index(kind: str, stem: str, trained: Any, tmp_path: Path) -> None:
    folder, state = trained
    out = tmp_path / "out"
    assert main(["ckpt", "export", str(folder), str(out), "--format", kind, "--max-shard-size", "300B"]) == 0
    index = json.loads((out / f"{stem}.{kind}.index.json").read_text())
    files = sorted(path for path in out.iterdir() if path.suffix != ".json")
    assert sorted(set(index["weight_map"].values())) == [path.name for path in files]
    assert files[0].name == f"{stem}-00001-of-{len(files):05d}.{kind}"
    assert len(files) > 2
    found = {}
    for path in files:
        part = load_file(path) if kind == "safetensors" else torch.load(path, weights_only=True)
        assert {index["weight_map"][name] for name in part} == {path.name}
        assert len(part) == 1 or sum(value.nbytes for value in part.values()) <= 300
        found.update(part)
    same(found, state)
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in found.values())


def test_a_bin_holds_each_tensor_alone(trained: Any, tmp_path: Path) -> None:
    folder, state = trained
    assert main(["ckpt", "export", str(folder), str(tmp_path / "out"), "--format", "bin"]) == 0
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["pytorch_model.bin"]
    found = torch.load(tmp_path / "out" / "pytorch_model.bin", weights_only=True)
    same(found, state)
    assert all(value.untyped_storage().nbytes() == value.nbytes for value in found.values())


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_a_type_is_chosen_for_floating_tensors_alone(kind: str, trained: Any, tmp_path: Path) -> None:
    folder, state = trained
    assert main(["ckpt", "export", str(folder), str(tmp_path), "--format", kind, "--dtype", "bf16"]) == 0
    found = (
        load_file(tmp_path / "model.safetensors")
        if kind == "safetensors"
        else torch.load(tmp_path / "pytorch_model.bin", weights_only=True)
    )
    for name, value in found.items():
        wanted = state[name].bfloat16() if state[name].is_floating_point() else state[name]
        assert torch.equal(value, wanted)
        assert value.dtype == wanted.dtype


def test_one_kind_is_exported(trained: Any, tmp_path: Path) -> None:
    folder, _ = trained
    arguments = ["ckpt", "export", str(folder), str(tmp_path), "--format", "safetensors", "--kind", "exp_avg"]
    assert main(arguments) == 0
    found = load_file(tmp_path / "model.safetensors")
    assert set(found) == {"embed.weight", "inner.weight", "inner.bias", "norm.weight", "norm.bias"}
    assert found["inner.weight"].abs().sum() > 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--kind", "momentum"], "the kinds there are buffer, exp_avg, exp_avg_sq, param"),
        (["--kind", "param", "--kind", "exp_avg"], "export one kind at a time"),
        (["--dtype", "fp9"], "no element type is called 'fp9'"),
        (["--dtype", "int8"], "not a floating type"),
        (["--tag", "none"], "does not exist"),
    ],
    ids=["kind", "kinds", "type", "integers", "tag"],
)
def test_what_cannot_be_exported_is_said(
    arguments: list[str], said: str, trained: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(["ckpt", "export", str(trained[0]), str(out), "--format", "safetensors", *arguments]) == 1
    assert said in capsys.readouterr().err
    assert not out.exists()


def test_an_export_writes_over_nothing(trained: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model.safetensors").write_text("precious")
    assert main(["ckpt", "export", str(trained[0]), str(tmp_path), "--format", "safetensors"]) == 1
    assert "is not an empty folder" in capsys.readouterr().err
    assert (tmp_path / "model.safetensors").read_text() == "precious"


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
@pytest.mark.parametrize("most", ["5GB", "300B"])
def test_weights_come_back_and_load(kind: str, most: str, trained: Any, tmp_path: Path) -> None:
    folder, state = trained
    out, back = str(tmp_path / "out"), str(tmp_path / "back")
    assert main(["ckpt", "export", str(folder), out, "--format", kind, "--max-shard-size", most]) == 0
    assert main(["ckpt", "import", out, back, "--from", kind, "--buffer", "*.running_*"]) == 0
    assert values(Path(back)) == {key: held for key, held in values(folder).items() if key[1] in ("param", "buffer")}
    engine, *_ = polyaccel.initialize(model=built(3), config=CONFIG)
    engine.load_checkpoint(back, load_module_only=True)
    assert all(torch.equal(value, state[name]) for name, value in engine.module_state_dict().items())


def test_an_engine_goes_on_from_weights_alone(tmp_path: Path) -> None:
    torch.manual_seed(5)
    plain = nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 11))
    save_file(plain.state_dict(), tmp_path / "model.safetensors")
    assert (
        main(["ckpt", "import", str(tmp_path / "model.safetensors"), str(tmp_path / "c"), "--from", "safetensors"]) == 0
    )
    for module_only in (True, False):
        torch.manual_seed(6)
        engine, *_ = polyaccel.initialize(model=nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 11)), config=CONFIG)
        path, client_state = engine.load_checkpoint(str(tmp_path / "c"), load_module_only=module_only)
        assert (path, client_state) == (f"{tmp_path}/c/imported", {})
        assert engine.global_steps == 0
        state = engine.module_state_dict()
        assert all(torch.equal(state[name], value) for name, value in plain.state_dict().items())
        assert steps(engine, 2)[1] > 0


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_torch_reads_a_dcp_and_so_do_we(trained: Any, tmp_path: Path) -> None:
    folder, state = trained
    out, back = tmp_path / "out", tmp_path / "back"
    assert main(["ckpt", "export", str(folder), str(out), "--format", "dcp"]) == 0
    names = ["embed.weight", "inner.weight", "inner.bias", "norm.weight", "norm.bias"]
    moments = {
        name: {
            "exp_avg": torch.empty_like(state[name]),
            "exp_avg_sq": torch.empty_like(state[name]),
            "step": torch.zeros(()),
        }
        for name in names
    }
    tree: dict[str, Any] = {
        "model": {name: torch.empty_like(value) for name, value in state.items() if name != "head.weight"},
        "optimizer": {"state": moments},
    }
    dcp.load(tree, checkpoint_id=out, no_dist=True)
    same(tree["model"], state)
    held = values(folder)
    for name, states in tree["optimizer"]["state"].items():
        assert states["step"].item() == 3
        assert states["exp_avg"].numpy().tobytes() == held[name, "exp_avg"][2]
        assert states["exp_avg_sq"].numpy().tobytes() == held[name, "exp_avg_sq"][2]
    assert main(["ckpt", "import", str(out), str(back), "--from", "dcp", "--buffer", "norm.running_*"]) == 0
    tied = {("head.weight", "param"): held["embed.weight", "param"]}  # torch's own has both names
    assert values(back) == held | tied
    assert open_checkpoint(back).scalars["param_steps"] == dict.fromkeys(names, 3)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_training_goes_on_from_a_dcp_as_torch_would(tmp_path: Path) -> None:
    """Moments and counts of updates that torch wrote: the next losses are torch's own."""
    from torch.distributed.checkpoint.state_dict import get_state_dict

    torch.manual_seed(3)
    model = nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 11))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    class Plain:
        """torch's loop behind an engine's calls."""

        def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
            return model(tokens)  # type: ignore[no-any-return]

        def backward(self, loss: torch.Tensor) -> None:
            loss.backward()

        def step(self) -> None:
            optimizer.step()
            optimizer.zero_grad()

    steps(Plain(), 3)
    states = get_state_dict(model, optimizer)
    dcp.save({"model": states[0], "optimizer": states[1]}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    wanted = steps(Plain(), 3, first=3)
    assert main(["ckpt", "import", str(tmp_path / "dcp"), str(tmp_path / "c"), "--from", "dcp"]) == 0
    config = {**CONFIG, "zero_optimization": {"stage": 2}}
    config["optimizer"] = {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.01}}
    torch.manual_seed(4)
    engine, *_ = polyaccel.initialize(model=nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 11)), config=config)
    engine.load_checkpoint(str(tmp_path / "c"))
    assert steps(engine, 3, first=3) == pytest.approx(wanted, abs=1e-6)
    torch.manual_seed(4)
    other, *_ = polyaccel.initialize(model=nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 11)), config=config)
    other.load_checkpoint(str(tmp_path / "c"), load_optimizer_states=False)
    assert steps(other, 3, first=3) != pytest.approx(wanted, abs=1e-6)


class Evil:
    """Runs a command when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize("kind", ["bin", "dcp"])
def test_a_pickle_of_a_stranger_is_refused_by_name(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, ran = tmp_path / "source", tmp_path / "ran"
    source.mkdir()
    if kind == "bin":
        torch.save({"w": torch.ones(2), "x": Evil(ran)}, source / "pytorch_model.bin")
    else:
        (source / ".metadata").write_bytes(pickle.dumps(Evil(ran)))
    assert main(["ckpt", "import", str(source), str(tmp_path / "c"), "--from", kind]) == 1
    assert "posix.system" in capsys.readouterr().err
    assert not ran.exists()
    assert not (tmp_path / "c").exists()


def file_with(header: object, data: bytes = b"") -> bytes:
    encoded = json.dumps(header).encode()
    return len(encoded).to_bytes(8, "little") + encoded + data


BROKEN = {
    "empty": b"",
    "short": b"\xff" * 20,
    "no header": (4).to_bytes(8, "little") + b"[1]]",
    "a list": file_with([1]),
    "outside": file_with({"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}, bytes(8)),
    "other length": file_with({"w": {"dtype": "F32", "shape": [3], "data_offsets": [0, 16]}}, bytes(16)),
    "no numbers": file_with({"w": {"dtype": "F32", "shape": ["x"], "data_offsets": [0, 16]}}, bytes(16)),
    "unknown type": file_with({"w": {"dtype": "F8_E4M3", "shape": [1], "data_offsets": [0, 1]}}, bytes(1)),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_named(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(BROKEN[name])
    assert main(["ckpt", "import", str(path), str(tmp_path / "c"), "--from", "safetensors"]) == 1
    error = capsys.readouterr().err
    assert str(path) in error
    assert "hint:" in error
    assert not (tmp_path / "c").exists()


def test_an_unknown_format_and_a_missing_file_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ckpt", "import", str(tmp_path), str(tmp_path / "c"), "--from", "gguf"]) == 1
    assert "expected one of safetensors, bin, dcp" in capsys.readouterr().err
    assert main(["ckpt", "import", str(tmp_path / "no"), str(tmp_path / "c"), "--from", "bin"]) == 1
    assert "does not exist" in capsys.readouterr().err
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"w": "model-1.safetensors"}}')
    assert main(["ckpt", "import", str(tmp_path), str(tmp_path / "c"), "--from", "safetensors"]) == 1
    assert "model-1.safetensors" in capsys.readouterr().err


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_a_resharded_checkpoint_holds_the_same_and_training_goes_on(ranks: int, trained: Any, tmp_path: Path) -> None:
    folder, _ = trained
    assert main(["ckpt", "reshard", str(folder), str(tmp_path), "--ranks", str(ranks)]) == 0
    assert values(tmp_path) == values(folder)
    reader = open_checkpoint(tmp_path)
    assert reader.world_size == ranks
    assert len(list(tmp_path.glob("*/save-*/rank*.safetensors"))) == ranks
    assert reader.scalars == open_checkpoint(folder).scalars

    def resume(communicator: Communicator, place: Path) -> list[float]:
        engine, *_ = polyaccel.initialize(model=built(2), config=CONFIG)
        engine.load_checkpoint(str(place))
        assert engine.global_steps == 3
        return steps(engine, 2, first=3)

    assert run_threads(2, resume, tmp_path) == run_threads(2, resume, folder)


@pytest.mark.parametrize("name", ["checkpoint_v1", "checkpoint_v2"])
def test_reshard_converts_older_formats_and_blocks(name: str, tmp_path: Path) -> None:
    golden = Path(__file__).parents[2] / "golden" / name
    assert main(["ckpt", "reshard", str(golden), str(tmp_path)]) == 0
    assert values(tmp_path) == values(golden)
    assert main(["ckpt", "diff", str(tmp_path), str(golden)]) == 0
    assert json.loads(next(tmp_path.glob("*/save-*/manifest.json")).read_bytes())["format"][0] == 2


def test_a_damaged_checkpoint_is_neither_exported_nor_resharded(
    trained: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = trained
    assert main(["ckpt", "reshard", str(folder), str(tmp_path / "c"), "--ranks", "1"]) == 0
    (file,) = (tmp_path / "c").glob("*/save-*/rank00000.safetensors")
    data = bytearray(file.read_bytes())
    length = int.from_bytes(data[:8], "little")
    at = json.loads(data[8 : 8 + length])["embed.weight:param"]["data_offsets"][0]
    data[8 + length + at] ^= 1
    file.write_bytes(data)
    capsys.readouterr()
    for arguments in (["reshard"], ["export", "--format", "safetensors"], ["export", "--format", "bin"]):
        verb, *rest = arguments
        out = tmp_path / "-".join(arguments)
        assert main(["ckpt", verb, str(tmp_path / "c"), str(out), *rest]) == 1
        assert "is damaged" in capsys.readouterr().err
        assert not list(out.rglob("*.safetensors")) + list(out.rglob("*.bin"))


def test_types_are_converted_as_torch_does() -> None:
    numbers = torch.randn(4096, generator=torch.Generator().manual_seed(0)) * torch.logspace(-45, 38, 4096)
    special = torch.tensor([0.0, -0.0, float("inf"), float("-inf"), 3.4e38, 1e-45, 1.00390625, 1.01171875])
    numbers = torch.cat([numbers, special])
    data = numbers.numpy().view(np.uint8)
    for dtype in (DType.BFLOAT16, DType.FLOAT16, DType.FLOAT64):
        found = converted(data, DType.FLOAT32, dtype)
        wanted = numbers.to(getattr(torch, dtype.value))
        assert found.tobytes() == wanted.view(torch.uint8).numpy().tobytes()
        back = converted(found, dtype, DType.FLOAT32)
        assert back.tobytes() == wanted.float().view(torch.uint8).numpy().tobytes()
    nan = converted(np.array([np.nan, -np.nan], np.float32).view(np.uint8), DType.FLOAT32, DType.BFLOAT16)
    assert np.isnan(as_numbers(nan, DType.BFLOAT16)).all()
