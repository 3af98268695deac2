"""A training of GPT-NeoX's shape comes to the figures of the real package, over the stages of the drop-in."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
PLUGIN = ROOT / "plugins" / "polyaccel-deepspeed"
SCRIPT = ROOT / "tests" / "support" / "pipelines" / "neox_training.py"

# Of DeepSpeed 0.19.8 over gloo, on CPUs.
REAL: dict[tuple[int, int], dict[str, Any]] = {
    (2, 2): {
        "losses": [3.2904748916625977, 3.4753401279449463, 3.469972848892212],
        "norms": [1.896844506263733, 2.027123212814331, 1.2217168807983398],
        "evaluated": 3.274655818939209,
        "short": 3.333987236022949,
        "tokens": [1, 1, 1],
        "after": [3.202909231185913, 3.1939992904663086],
        "rate": 0.015,
        "names": [
            "4",
            "6",
            "tied_modules.embed.position_embeddings.weight",
            "tied_modules.embed.word_embeddings.weight",
        ],
        "logits": 244.04962988656976,
    },
    (2, 1): {
        "losses": [3.3293020725250244, 3.3820152282714844, 3.507969379425049],
        "norms": [1.4692444801330566, 1.8131740093231201, 1.0309998989105225],
        "evaluated": 3.214705467224121,
        "short": 3.2706546783447266,
        "tokens": [1, 1, 1],
        "after": [3.2664852142333984, 3.1759095191955566],
        "rate": 0.015,
        "names": [
            "2",
            "3",
            "4",
            "6",
            "tied_modules.embed.position_embeddings.weight",
            "tied_modules.embed.word_embeddings.weight",
        ],
        "logits": 239.96021288411526,
    },
}


def results(folder: Path, ranks: int, stages: int, interval: int) -> dict[str, Any]:
    environment = {**os.environ, "PYTHONPATH": str(PLUGIN), "CHECKPOINT_NUM_LAYERS": str(interval)}
    command = [sys.executable, "-m", "polyaccel", "run", "--nproc", str(ranks), str(SCRIPT), str(folder), str(stages)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = [line for line in done.stdout.splitlines() if "RESULT" in line]
    return json.loads(found.partition("RESULT ")[2])


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("ranks", "stages", "interval"), [(2, 2, 0), (2, 1, 1)])
def test_a_training_of_neox_s_shape_is_that_of_the_real_package(tmp_path, ranks, stages, interval):
    found, expected = results(tmp_path, ranks, stages, interval), REAL[ranks, stages]
    for name in ("losses", "norms", "evaluated", "short", "after", "logits", "rate"):
        assert found[name] == pytest.approx(expected[name], rel=1e-5), name
    assert found["tokens"] == expected["tokens"]
    names = {name if name.startswith("tied") else name.partition(".")[0] for name in found["names"]}
    assert names <= set(expected["names"])  # tied modules of another stage are not in ours
