"""The notebook's cells, in order: real ranks train by DDP, FSDP2 and polyaccel, and end with plain torch's loss."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parents[3] / "examples" / "notebooks" / "two_ranks.ipynb"


def as_script(source: str) -> str:
    """Return a cell as Python: what IPython does for `%%writefile NAME`, and for lines that begin with `!`."""
    if source.startswith("%%writefile "):
        name, _, text = source.removeprefix("%%writefile ").partition("\n")
        return f"__import__('pathlib').Path({name!r}).write_text({text!r})"
    call = r"print(__import__('subprocess').check_output(f'\1', shell=True, text=True))"
    return re.sub(r"^!(.*)$", call, source, flags=re.MULTILINE)


@pytest.mark.timeout(320)
def test_its_cells_train_to_one_loss(tmp_path: Path) -> None:
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] or cell["execution_count"] for cell in code), "clear the outputs"
    script = tmp_path / "cells.py"
    script.write_text("\n".join(as_script("".join(cell["source"])) for cell in code), encoding="utf-8")
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(
        [sys.executable, script], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr
    losses = {name: float(loss) for name, loss in re.findall(r"(\w[\w ]*(?:, stage 3)?): loss (\S+)", done.stdout)}
    assert set(losses) == {"plain torch", "DDP", "FSDP2", "polyaccel, stage 3"}
    assert 0 < losses["plain torch"] < 0.3  # from 1
    assert list(losses.values()) == pytest.approx([losses["plain torch"]] * 4, rel=1e-3)
    assert re.search(r"^3\* +none ", done.stdout, re.MULTILINE)  # the plan, with this config's setting
