"""Stand-ins for packages and their data: what newer libraries dropped, and data sets that would be downloaded."""

from __future__ import annotations

import functools
import sys
import types
from importlib import import_module
from typing import Any

import torch
from script_shims import absent, shim


@shim
def fromstring() -> None:
    """numpy before 2.3, whose `fromstring` read bytes."""
    import numpy as np

    np.fromstring = lambda text, dtype: np.frombuffer(text, dtype=dtype).copy()  # type: ignore[assignment]


@shim
def drawn_images() -> None:
    """Images that are drawn in place of torchvision's data sets, which would be downloaded."""
    import torchvision

    def drawn(size: tuple[int, int], channels: int, count: int) -> type:
        class Drawn(torch.utils.data.Dataset):  # type: ignore[type-arg]
            classes = tuple(str(number) for number in range(10))

            def __init__(self, root: Any = None, train: bool = True, transform: Any = None, **kwargs: Any) -> None:
                self.transform = transform
                generator = torch.Generator().manual_seed(17 + train)
                shape = (count, *size, channels) if channels > 1 else (count, *size)
                self.data = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8).numpy()
                self.targets = torch.randint(0, 10, (count,), generator=generator).tolist()

            def __len__(self) -> int:
                return count

            def __getitem__(self, index: int) -> Any:
                from PIL import Image

                image: Any = Image.fromarray(self.data[index])
                return (self.transform(image) if self.transform else image), self.targets[index]

        return Drawn

    for name, size, channels in (("MNIST", (28, 28), 1), ("FashionMNIST", (28, 28), 1), ("CIFAR10", (32, 32), 3)):
        setattr(torchvision.datasets, name, drawn(size, channels, 128))
        for module in ("mnist", "cifar"):
            if hasattr(getattr(torchvision.datasets, module), name):
                setattr(getattr(torchvision.datasets, module), name, getattr(torchvision.datasets, name))


@shim
def no_workers() -> None:
    """Loaders that read in the rank itself: how many processes draw random samples follows the machine's devices."""
    start = torch.utils.data.DataLoader.__init__

    @functools.wraps(start)
    def started(self: Any, *args: Any, **kwargs: Any) -> None:
        for name in ("num_workers", "prefetch_factor", "persistent_workers", "multiprocessing_context"):
            kwargs.pop(name, None)
        start(self, *args, **kwargs)

    torch.utils.data.DataLoader.__init__ = started  # type: ignore[method-assign]


@shim
def streamed() -> None:
    """mosaicml-streaming: a data set of drawn latents and captions in place of files on a bucket."""
    import numpy as np

    class Drawn(torch.utils.data.Dataset):  # type: ignore[type-arg]
        def __init__(self, **kwargs: Any) -> None:
            pass

        def __len__(self) -> int:
            return 12

        def __getitem__(self, index: int) -> dict[str, Any]:
            generator = np.random.default_rng(index)
            return {
                "vae_256x256_latents": generator.normal(size=4 * 8 * 8).astype(np.float16),
                "t5_xl_embeddings": generator.integers(0, 256, size=4 * 16).astype(np.float32),
            }

    absent("streaming")
    import streaming  # type: ignore[import-not-found]
    import streaming.base.format.mds.encodings as encodings  # type: ignore[import-not-found]

    streaming.StreamingDataset = Drawn
    encodings.Encoding = object
    encodings._encodings = {}


@shim
def text_datasets() -> None:
    """Drawn text in place of data sets of the hub."""
    import datasets
    from script_stand_ins import hub_rows

    def loaded(path: str, name: Any = None, *, split: Any = None, **kwargs: Any) -> Any:
        if path in ("json", "csv", "text", "parquet"):
            return load(path, name, split=split, **kwargs)
        drawn = datasets.Dataset.from_list(hub_rows(path))
        return drawn if split else datasets.DatasetDict(train=drawn, validation=drawn, test=drawn)

    load = datasets.load_dataset
    datasets.load_dataset = loaded


@shim
def accelerate_on_cpus() -> None:
    """Accelerate's gloo, which it takes only from an argument."""
    import accelerate

    start = accelerate.Accelerator.__init__

    @functools.wraps(start)
    def started(self: Any, *args: Any, **kwargs: Any) -> None:
        handlers = [*(kwargs.pop("kwargs_handlers", None) or []), accelerate.InitProcessGroupKwargs(backend="gloo")]
        start(self, *args, kwargs_handlers=handlers, **kwargs)

    accelerate.Accelerator.__init__ = started  # type: ignore[method-assign]


@shim
def old_transformers() -> None:
    """Names and arguments that transformers 5 no longer has: `Trainer(tokenizer=)`, `transformers.deepspeed`, ..."""
    import transformers
    from transformers.integrations import deepspeed as integration

    start = transformers.Trainer.__init__

    @functools.wraps(start)
    def started(self: Any, *args: Any, **kwargs: Any) -> None:
        if "tokenizer" in kwargs:
            kwargs["processing_class"] = kwargs.pop("tokenizer")
        start(self, *args, **kwargs)

    transformers.Trainer.__init__ = started  # type: ignore[method-assign]
    from transformers import initialization, modeling_utils

    modeling_utils.no_init_weights = initialization.no_init_weights  # type: ignore[attr-defined]
    transformers.PreTrainedTokenizerFast.legacy = True  # type: ignore[attr-defined]
    transformers.PreTrainedTokenizerFast.save_vocabulary = lambda *args, **kwargs: ()  # type: ignore[method-assign]
    sys.modules["transformers.deepspeed"] = integration
    transformers.deepspeed = integration
    for kind in (transformers.TrainingArguments, transformers.Seq2SeqTrainingArguments):
        kind.__init__ = _newer(kind.__init__)  # type: ignore[misc]
    load = transformers.AutoModelForCausalLM.from_pretrained

    def loaded(*args: Any, **kwargs: Any) -> Any:
        for name in ("use_flash_attention_2", "load_in_4bit", "load_in_8bit"):
            assert not kwargs.pop(name, False), name
        return load(*args, **kwargs)

    transformers.AutoModelForCausalLM.from_pretrained = loaded  # type: ignore[method-assign, assignment]


def _newer(start: Any) -> Any:
    """The arguments of transformers 4 as those of transformers 5."""

    @functools.wraps(start)
    def argued(self: Any, *args: Any, **kwargs: Any) -> None:
        if "evaluation_strategy" in kwargs:
            kwargs["eval_strategy"] = kwargs.pop("evaluation_strategy")
        if "warmup_ratio" in kwargs:
            kwargs["warmup_steps"] = kwargs.pop("warmup_ratio")
        for name in ("logging_dir", "tpu_num_cores", "overwrite_output_dir", "no_cuda", "group_by_length"):
            kwargs.pop(name, None)
        start(self, *args, **kwargs)

    return argued


@shim
def on_cpus() -> None:
    """Arguments of the Trainer for CPU ranks, where a script has no option for them, and models that stay there."""
    import transformers

    for kind in (transformers.TrainingArguments, transformers.Seq2SeqTrainingArguments):
        kind.__init__ = _for_cpus(kind.__init__)  # type: ignore[misc]
    load = transformers.PreTrainedModel.from_pretrained.__func__  # type: ignore[attr-defined]

    @functools.wraps(load)
    def loaded(kind: Any, *args: Any, device_map: Any = None, **kwargs: Any) -> Any:
        return load(kind, *args, **kwargs)

    transformers.PreTrainedModel.from_pretrained = classmethod(loaded)  # type: ignore[assignment, arg-type]


def _for_cpus(start: Any) -> Any:
    @functools.wraps(start)
    def argued(self: Any, *args: Any, **kwargs: Any) -> None:
        shared = {"use_cpu": True, "ddp_backend": "gloo", "report_to": "none", "fp16": False, "bf16": False}
        start(self, *args, **{**kwargs, **shared})

    return argued


@shim
def one_share() -> None:
    """The same batches for all ranks, as ranks that share a model need them: samplers deal to one rank, and Accelerate
    moves its schedule on once a step, not once for each rank that would have other batches. All ranks have one
    seed, for trainers that sample completions."""
    import accelerate.data_loader
    from torch.utils.data import distributed

    start = distributed.DistributedSampler.__init__
    distributed.DistributedSampler.__init__ = (  # type: ignore[method-assign]
        lambda self, dataset, *args, **kwargs: start(self, dataset, **{**kwargs, "num_replicas": 1, "rank": 0})
    )
    prepare = accelerate.data_loader.prepare_data_loader

    @functools.wraps(prepare)
    def prepared(*args: Any, **kwargs: Any) -> Any:
        return prepare(*args, **{**kwargs, "num_processes": 1, "process_index": 0, "torch_device_mesh": None})

    accelerate.data_loader.prepare_data_loader = prepared
    accelerate.accelerator.prepare_data_loader = prepared
    schedule = accelerate.scheduler.AcceleratedScheduler.__init__
    accelerate.scheduler.AcceleratedScheduler.__init__ = (  # type: ignore[method-assign]
        lambda self, *args, **kwargs: schedule(self, *args, **{**kwargs, "split_batches": True})
    )
    seed = accelerate.utils.set_seed
    accelerate.utils.set_seed = lambda number, device_specific=False, **kwargs: seed(number, **kwargs)


@shim
def qwen_tokenizer() -> None:
    """The numbers that Qwen's own tokenizer has for its marks."""
    import transformers

    for name, number in (("eod_id", 2), ("im_start_id", 1), ("im_end_id", 2)):
        setattr(transformers.PreTrainedTokenizerBase, name, number)


@shim
def old_timm() -> None:
    """torch's and timm's modules of 2022: `torch._six`, `timm.optim.novograd`."""
    six = types.ModuleType("torch._six")
    six.inf = float("inf")  # type: ignore[attr-defined]
    sys.modules["torch._six"] = six
    absent("timm.optim.novograd")


@shim
def videos() -> None:
    """decord: a reader that draws the frames of any file."""
    import numpy as np

    class Reader:
        def __init__(self, name: str, **kwargs: Any) -> None:
            seed = sum(map(ord, str(name)))
            self.frames = np.random.default_rng(seed).integers(0, 256, (16, 40, 40, 3), dtype=np.uint8)

        def __len__(self) -> int:
            return len(self.frames)

        def seek(self, number: int) -> None:
            return None

        def get_batch(self, numbers: Any) -> Any:
            frames = self.frames[np.asarray(numbers)]
            return types.SimpleNamespace(asnumpy=lambda: frames)

    absent("decord")
    import decord  # type: ignore[import-not-found]

    decord.VideoReader = Reader


@shim
def stocks() -> None:
    """yfinance: prices of a random walk."""
    import numpy as np
    import pandas as pd

    def download(*args: Any, **kwargs: Any) -> Any:
        steps = np.random.default_rng(5).normal(0.05, 1.0, 460)
        return pd.DataFrame({"Close": 100 + np.cumsum(steps)}, index=pd.date_range("2015-01-01", periods=460))

    absent("yfinance")
    import yfinance  # type: ignore[import-not-found]

    yfinance.download = download


@shim
def old_torch() -> None:
    """Names of torch 2.2: `ProcessGroup.options`, and types that the module of convolutions had."""
    import typing

    from torch.nn.modules import conv

    for name in ("Union", "Optional"):
        setattr(conv, name, getattr(typing, name))
    options = property(lambda group: group._get_backend(torch.device("cpu")).options)
    torch.distributed.ProcessGroup.options = options  # type: ignore[attr-defined]


@shim
def sounds() -> None:
    """torchaudio, librosa and langid: waves that are drawn by their names, and bands of their windows."""
    for name in ("torchaudio", "librosa", "langid", "whisper"):
        absent(name)
    torchaudio, langid, kaldi = map(import_module, ("torchaudio", "langid.langid", "torchaudio.compliance.kaldi"))

    def load(name: Any, **kwargs: Any) -> tuple[torch.Tensor, int]:
        drawn = torch.Generator().manual_seed(sum(map(ord, str(name))))
        return torch.rand(1, 16_000 * 2 // 5, generator=drawn) / 32_768, 16_000

    def fbank(wave: torch.Tensor, num_mel_bins: int = 23, **kwargs: Any) -> torch.Tensor:
        bands = torch.randn(400, num_mel_bins, generator=torch.Generator().manual_seed(1))
        return (wave[0].unfold(0, 400, 160) @ bands).square().log1p()

    torchaudio.load, kaldi.fbank = load, fbank  # type: ignore[attr-defined]
    language = types.SimpleNamespace(set_languages=lambda names: None, classify=lambda text: ("en", 1.0))
    langid.LanguageIdentifier = types.SimpleNamespace(from_modelstring=lambda *args, **kwargs: language)


@shim
def lightning_on_cpus() -> None:
    """Lightning's strategy asks twice for CUDA devices, and for the number of one."""
    accelerators = import_module("lightning.fabric.accelerators")
    accelerators.CPUAccelerator.get_parallel_devices = staticmethod(  # type: ignore[attr-defined]
        lambda devices: [torch.device("cpu", 0)] * devices
    )
    strategies = import_module("lightning.fabric.strategies.deepspeed")
    strategies.CUDAAccelerator = accelerators.Accelerator  # type: ignore[attr-defined]
    strategies._validate_device_index_selection = lambda devices: None  # type: ignore[attr-defined]
