"""Configs that nobody would write: accepted, or refused with a ConfigError that names what is wrong."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from fault_table import TABLE, Ends
from forging import COUNT, forged, garbled, random_of

from polyaccel.config import load_resolved
from polyaccel.config.jsonc import parse_json
from polyaccel.errors import ConfigError

CONFIG: dict[str, Any] = {
    "train_batch_size": 16,
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-8}},
    "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 10, "total_num_steps": 100}},
    "fp16": {"enabled": False, "initial_scale_power": 16, "hysteresis": 2},
    "bf16": {"enabled": True},
    "zero_optimization": {
        "stage": 3,
        "reduce_bucket_size": 5e8,
        "offload_optimizer": {"device": "nvme", "nvme_path": "/tmp", "ratio": 0.5},
        "cpu_offload": False,
    },
    "comm": {"timeout_s": 60.0, "dump_dir": None},
    "comms_logger": {"enabled": True, "prof_ops": ["all_reduce"]},
    "flops_profiler": {"enabled": False},
}
ENDING = Ends("a ConfigError with key, value and hint", "resolved, or refused")


def test_no_config_is_a_traceback() -> None:
    random = random_of(14)
    hints = {"per_device_train_batch_size": 2}
    with TABLE.case("forged configs", ENDING):
        for _ in range(COUNT // 20):
            with suppress(ConfigError):
                load_resolved(forged(CONFIG, random, most=4), world_size=2, hints=hints)


def test_no_text_of_a_config_is_a_traceback(tmp_path: Path) -> None:
    random, text = random_of(15), json.dumps(CONFIG, indent=1).replace("\n", " // a\n", 3).encode()
    with TABLE.case("garbled text of configs", ENDING):
        for _ in range(COUNT // 4):
            with suppress(ConfigError):
                parse_json(garbled(text, random).decode("utf-8", errors="replace"), source="x")
