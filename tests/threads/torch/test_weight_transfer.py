"""Weights that an engine sends: those of its state dict, bit for bit, by names that transformers and PEFT read."""

from __future__ import annotations

import json
import os
import socket
from contextlib import suppress
from functools import partial
from threading import Thread

import pytest
import torch
from parity_models import assert_bitwise, batch, make_config, on_threads, parity_model
from torch import nn

import polyaccel
from polyaccel.errors import CheckpointError, CommError, PolyaccelError, ShardingError
from polyaccel.job.memory_server.protocol import seal_length, send
from polyaccel.ops.native import crc32
from polyaccel.torch.weight_transfer import WeightReceiver, read_weights
from polyaccel.torch.weight_transfer.folder import DIGESTS
from polyaccel.torch.weight_transfer.sender import SharedMemorySender

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")  # PEFT's own
ANY_PORT = "tcp://127.0.0.1:0"
SMALL = {"reduce_bucket_size": 300, "stage3_param_persistence_threshold": 30}
TIED = "head.weight"


@pytest.fixture
def with_secret(monkeypatch):
    monkeypatch.setenv("POLYACCEL_JOB_SECRET", "a secret of these tests")


class Receiving:
    """A receiver in a thread, which calls `take` on each transfer until the context ends."""

    def __init__(self, path, take, times=1, address=None):
        self._receiver = WeightReceiver(address or f"unix:{path}/socket")
        self.address, self.results, self.errors = self._receiver.address, [], []
        self._thread = Thread(target=self._run, args=(take, times))

    def _run(self, take, times):
        for _ in range(times):
            try:
                self.results.append(take(self._receiver.receive(60.0)))
            except PolyaccelError as error:
                self.errors.append(error)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._thread.join()
        self._receiver.close()


def engine_of(model, stage, **keys):
    return polyaccel.initialize(model=model, config=make_config(stage, zero=SMALL if stage else {}, **keys))[0]


def train_parity(engine, rank=0):
    for number in range(2):
        engine.backward(engine(*batch(number, 0, rank)))
        engine.step()


def send_parity(communicator, model, address, stage, keys, dtype):
    engine = engine_of(model, stage, **keys)
    train_parity(engine, communicator.rank)
    report = engine.send_weights(address, dtype=dtype, bucket_nbytes=200, version=7)
    state = {name: tensor.clone() for name, tensor in engine.module_state_dict().items()}
    train_parity(engine, communicator.rank)
    engine.destroy()
    return report, state


@pytest.mark.parametrize(
    ("stage", "world", "keys", "dtype"),
    [
        (0, 1, {}, None),
        (1, 2, {}, None),
        (2, 2, {"bf16": {"enabled": True}}, None),
        (3, 2, {}, torch.bfloat16),
        (3, 2, {"zero_optimization": {"stage": 3}}, None),
    ],
)
def test_the_state_dict_in_pieces(tmp_path, stage, world, keys, dtype):
    """Whatever the stage; tensors that are longer than a bucket come in several."""
    with Receiving(tmp_path, lambda update: (update.version, dict(update))) as receiving:
        build = partial(send_parity, address=receiving.address, stage=stage, keys=keys, dtype=dtype)
        sent = on_threads(world, build, parity_model)
    ((version, found),) = receiving.results
    report, state = sent[0]
    assert version == report.version == 7
    assert all(each == report for each, _ in sent)
    assert found.keys() == state.keys() - {TIED}
    assert report.tensors == len(found)
    assert report.nbytes == sum(tensor.nbytes for tensor in found.values())
    assert_bitwise(found, {name: state[name].to(dtype or state[name].dtype) for name in found})


def test_several_receivers_and_transfers(tmp_path):
    (tmp_path / "b").mkdir()
    engine = engine_of(parity_model(), 0)
    models = [parity_model(), parity_model().to(torch.bfloat16)]
    with (
        Receiving(tmp_path, lambda update: update.load_into(models[0]), times=2) as first,
        Receiving(tmp_path / "b", lambda update: update.load_into(models[1]), times=2) as second,
    ):
        for _ in range(2):
            train_parity(engine)
            engine.send_weights([first.address, second.address], bucket_nbytes=300)
    assert_bitwise(models[0].state_dict(), engine.module_state_dict())
    wanted = {name: tensor.to(torch.bfloat16) for name, tensor in engine.module_state_dict().items()}
    assert_bitwise(models[1].state_dict(), wanted)


class Buffers(nn.Module):
    """Buffers of several types, one that is not saved, and a parameter without elements."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.empty = nn.Parameter(torch.ones(0, 4))
        self.register_buffer("flags", torch.tensor([True, False, True]))
        self.register_buffer("passing", torch.ones(2), persistent=False)

    def forward(self, x):
        return self.norm(x).sum()


def test_buffers_and_empty_parameters(tmp_path):
    engine = engine_of(Buffers(), 0)
    engine.backward(engine(torch.arange(12.0).view(4, 3)))
    other = Buffers()
    with Receiving(tmp_path, lambda update: update.load_into(other)) as receiving:
        engine.send_weights(receiving.address)
    assert not receiving.errors
    assert_bitwise(other.state_dict(), engine.module_state_dict())
    engine.send_weights(tmp_path / "folder")
    assert_bitwise(dict(read_weights(tmp_path / "folder")), engine.module_state_dict())


def test_compiled_models_have_their_own_names(tmp_path):
    engine = engine_of(torch.compile(parity_model(), backend="eager"), 3)
    other = parity_model()
    with Receiving(tmp_path, lambda update: update.load_into(other)) as receiving:
        engine.send_weights(receiving.address)
    assert not receiving.errors
    state = engine.module_state_dict()
    assert_bitwise(other.state_dict(), {name.removeprefix("_orig_mod."): state[name] for name in state})


# Refusals: both sides name the parameter, and the engine trains on.


def narrower():
    model = parity_model()
    model.narrow = nn.Linear(30, 6)
    return model


def longer():
    model = parity_model()
    model.more = nn.Linear(2, 2)
    return model


@pytest.mark.parametrize(("build", "name"), [(narrower, "narrow.weight"), (longer, "more.weight"), (Buffers, "")])
def test_another_model_is_refused(tmp_path, build, name):
    engine = engine_of(parity_model(), 3)
    model = build()
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    refusing = Receiving(tmp_path, lambda update: update.load_into(model))
    with refusing as receiving, pytest.raises(PolyaccelError) as error:
        engine.send_weights(receiving.address)
    assert isinstance(receiving.errors[0], ShardingError)
    assert name in receiving.errors[0].message
    assert name in error.value.message
    assert_bitwise(model.state_dict(), before)
    train_parity(engine)


def test_a_wrong_digest_names_its_parameter(tmp_path, monkeypatch):
    engine = engine_of(parity_model(), 0)
    with Receiving(tmp_path, dict) as good:
        engine.send_weights(good.address)
    names, flush = [*good.results[0]], SharedMemorySender._flush

    def damage(self):
        for place, _, _, at, _ in self._pieces:
            if names[place] == "wide.weight":
                self._segments[self._filled % 2][at] ^= 1
        flush(self)

    monkeypatch.setattr(SharedMemorySender, "_flush", damage)
    with Receiving(tmp_path, dict) as receiving, pytest.raises(PolyaccelError) as error:
        engine.send_weights(receiving.address)
    assert isinstance(receiving.errors[0], CommError)
    assert receiving.errors[0].value == "wide.weight"
    assert "wide.weight" in error.value.message
    train_parity(engine)


def forge(change, head, note, pieces):
    """Messages of a sender of two elements, of which one is changed."""
    if change == "protocol":
        head["protocol"] = 2
    elif change == "size":
        head["segment_nbytes"] = 1 << 40
    elif change == "name twice":
        note.append(note[0])
    elif change == "type":
        note[0][1] = "Q4"
    elif change == "outside":
        pieces[0][3] = 64
    elif change == "tensor":
        pieces[0][0] = -1
    elif change == "gap":
        pieces[0][1:3] = [1, 1]
    elif change == "row":
        pieces.append("x")
    return change != "nothing"


@pytest.mark.parametrize(
    "change", ["nothing", "protocol", "size", "name twice", "type", "outside", "tensor", "gap", "row", "no end"]
)
def test_forged_messages_are_errors(tmp_path, change):
    """The receiver reads nothing outside its memory, and listens again."""
    head = {"type": "manifest", "protocol": 1, "version": 0, "adapter": False, "segments": 2, "segment_nbytes": 64}
    note, pieces = [["a", "F32", [2]]], [[0, 0, 2, 0, crc32(bytes(8))]]
    is_forged = forge(change, head, note, pieces)
    with socket.socket(socket.AF_UNIX) as peer, Receiving(tmp_path, dict) as receiving:
        peer.connect(receiving.address.removeprefix("unix:"))
        memory = os.memfd_create("forged", os.MFD_ALLOW_SEALING)
        os.truncate(memory, 128)
        seal_length(memory)
        with suppress(OSError):
            send(peer, head, json.dumps(note).encode(), memory)
            send(peer, {"type": "bucket", "segment": 0}, json.dumps(pieces).encode())
            if change == "no end":
                peer.shutdown(socket.SHUT_WR)
            send(peer, {"type": "end"})
        os.close(memory)
    assert [type(error) for error in receiving.errors] == ([CommError] if is_forged else [])
    assert len(receiving.results) == (not is_forged)


def test_an_update_is_taken_once(tmp_path):
    engine = engine_of(parity_model(), 0)
    engine.send_weights(tmp_path / "folder")
    update = read_weights(tmp_path / "folder")
    assert [info.name for info in update.tensors] == [name for name, _ in update]
    with pytest.raises(PolyaccelError):
        dict(update)


@pytest.mark.parametrize(
    "destination",
    [["folder", "unix:/x"], ["tcp://a:1", "unix:/x"], ["tcp://a:1"] * 2, ["unix:/x"] * 2, [], ["folder"], "tcp://a"],
)
def test_destinations_that_cannot_be_meant(destination):
    with pytest.raises(PolyaccelError):
        engine_of(parity_model(), 0).send_weights(destination)


# Folders.


def test_a_folder_is_new_and_compared(tmp_path):
    engine = engine_of(parity_model(), 0)
    folder = tmp_path / "weights"
    report = engine.send_weights(folder, bucket_nbytes=500)
    assert report.buckets == len([*folder.glob("*.safetensors")]) > 1
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert {folder / name for name in index["weight_map"].values()} == {*folder.glob("*.safetensors")}
    model = parity_model()
    read_weights(folder).load_into(model)
    assert_bitwise(model.state_dict(), engine.module_state_dict())
    with pytest.raises(CheckpointError):
        engine.send_weights(folder)
    assert [path.name for path in tmp_path.iterdir()] == ["weights"]
    damaged = next(path for path in folder.glob("*.safetensors"))
    data = bytearray(damaged.read_bytes())
    data[-1] ^= 1
    damaged.write_bytes(data)
    with pytest.raises(CheckpointError) as error:
        dict(read_weights(folder))
    assert error.value.value in dict(engine.module.named_parameters())
    (folder / DIGESTS).unlink()
    with pytest.raises(CheckpointError):
        read_weights(folder)


transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
from transformer_models import transformer_batch, transformer_model  # noqa: E402 - imports transformers


def send_transformer(communicator, model, folder, stage, keys):
    engine = engine_of(model, stage, verify="off", **keys)
    seed = 0 if "tensor_parallel" in keys else communicator.rank  # tensor ranks share a batch
    engine.backward(engine(**transformer_batch("gpt2", seed=seed)).loss)
    engine.step()
    engine.send_weights(folder, bucket_nbytes=3000)
    return engine.module_state_dict()


@pytest.mark.parametrize(
    ("kind", "stage", "keys"),
    [
        ("gpt2", 3, {}),
        ("llama", 3, {"bf16": {"enabled": True}}),
        ("llama", 2, {"tensor_parallel": {"autotp_size": 2}}),
    ],
)
def test_transformers_loads_the_folder(tmp_path, kind, stage, keys):
    work = partial(send_transformer, folder=tmp_path / "weights", stage=stage, keys=keys)
    state = on_threads(2, work, partial(transformer_model, kind))[0]
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "weights", dtype="auto")
    assert_bitwise(model.state_dict(), state)


def adapted(kind="gpt2"):
    settings = peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, init_lora_weights=False)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return peft.get_peft_model(transformer_model(kind), settings)


def send_adapter(communicator, model, destinations):
    engine = engine_of(model, 3)
    engine.backward(engine(**transformer_batch("gpt2", seed=communicator.rank)).loss)
    engine.step()
    for destination in destinations:
        engine.send_weights(destination, adapters_only=True)
    return engine.module_state_dict()


def test_tensor_ranks_over_groups(tmp_path, with_secret):
    """Blocks are joined one tensor at a time, and rank 0 sends them."""
    model = transformer_model("llama")
    with Receiving(tmp_path, lambda update: update.load_into(model), address=ANY_PORT) as receiving:
        keys = {"tensor_parallel": {"autotp_size": 2}}
        work = partial(send_transformer, folder=receiving.address, stage=2, keys=keys)
        state = on_threads(2, work, partial(transformer_model, "llama"))[0]
    assert_bitwise(model.state_dict(), state)


def send_after_each_step(communicator, model, destinations):
    engine = engine_of(model, 3, verify="off")
    for step in range(2):
        engine.backward(engine(**transformer_batch("gpt2", seed=2 * step + communicator.rank)).loss)
        engine.step()
        engine.send_weights(destinations, bucket_nbytes=3000)
    return engine.module_state_dict()


def test_receivers_of_groups_take_an_update_after_each_step(tmp_path, with_secret):
    models = [transformer_model("gpt2") for _ in range(2)]
    with (
        Receiving(tmp_path, lambda update: update.load_into(models[0]), times=2, address=ANY_PORT) as first,
        Receiving(tmp_path, lambda update: update.load_into(models[1]), times=2, address=ANY_PORT) as second,
    ):
        work = partial(send_after_each_step, destinations=[first.address, second.address])
        state = on_threads(2, work, partial(transformer_model, "gpt2"))[0]
    assert not first.errors + second.errors
    for model in models:
        assert_bitwise(model.state_dict(), state)


@pytest.mark.parametrize("address", [None, ANY_PORT])
def test_an_adapter_alone(tmp_path, with_secret, address):
    other = adapted()
    with Receiving(tmp_path, lambda update: update.load_into(other), address=address) as receiving:
        work = partial(send_adapter, destinations=[receiving.address, tmp_path / "adapter"])
        state = on_threads(2, work, adapted)[0]
    assert not receiving.errors
    assert_bitwise(other.state_dict(), state)
    read = peft.PeftModel.from_pretrained(transformer_model("gpt2"), tmp_path / "adapter")
    assert_bitwise(read.state_dict(), state)
    plain = engine_of(transformer_model("gpt2"), 0)
    with pytest.raises(PolyaccelError):
        plain.send_weights(tmp_path / "other", adapters_only=True)
