"""The ranks of a public script: shims first, then a recorder of losses around DeepSpeed's engine, then the script.

    python tests/scripts/script_ranks.py ORDER

ORDER is a file of JSON: the script, its arguments, the shims by name, the number of losses, and where they go. Ranks
are forked from one process that has imported the packages, which halves the cost of a run.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import runpy
import signal
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import torch


class Enough(SystemExit):
    """As many micro-batches as the table wants of a script that has no option for that."""


class Recorder:
    """The losses that a script gives to `backward`, or gets from `train_batch`, in their order."""

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self.losses: list[float] = []
        self.has_engine = False
        """Whether an engine took part: trainers do without one where their settings say so."""
        self._inside = False

    def watch(self, deepspeed: Any) -> None:
        """Record around the classes of the package that is installed."""
        for owner, name in ((deepspeed.DeepSpeedEngine, "backward"), (deepspeed.PipelineEngine, "train_batch")):
            setattr(owner, name, self._recorded(getattr(owner, name), name))
        direct = torch.Tensor.backward

        def backward(loss: Any, *args: Any, **kwargs: Any) -> Any:
            if self._is_foreign():
                return direct(loss, *args, **kwargs)
            if not self._inside:
                self.losses.append(float(loss.detach().double().sum()))
            self._inside, before = True, self._inside
            try:
                return direct(loss, *args, **kwargs)
            finally:
                self._inside = before

        torch.Tensor.backward = backward  # type: ignore[assignment]
        step = deepspeed.DeepSpeedEngine.step

        def stepped(engine: Any, *args: Any, **kwargs: Any) -> Any:
            self.has_engine = True
            result = step(engine, *args, **kwargs)
            if self.limit is not None and len(self.losses) >= self.limit and not self._inside:
                raise Enough(0)
            return result

        deepspeed.DeepSpeedEngine.step = stepped

    @staticmethod
    def _is_foreign() -> bool:
        """Whether polyaccel proves or measures a rewrite by a training that is not the script's."""
        if threading.current_thread() is not threading.main_thread():
            return True
        frame = sys._getframe(1)
        while frame is not None and not frame.f_globals.get("__name__", "").startswith("polyaccel."):
            frame = frame.f_back  # type: ignore[assignment]
        return frame is not None

    def _recorded(self, method: Any, name: str) -> Any:
        def recorded(engine: Any, *args: Any, **kwargs: Any) -> Any:
            if self._inside or self._is_foreign():
                return method(engine, *args, **kwargs)
            self._inside = self.has_engine = True
            try:
                if name == "backward":
                    loss = args[0] if args else kwargs["loss"]
                    self.losses.append(float(loss.detach().double().sum()))
                result = method(engine, *args, **kwargs)
            finally:
                self._inside = False
            if name == "train_batch":
                self.losses.append(float(result))
                if self.limit is not None and len(self.losses) >= self.limit:
                    raise Enough(0)
            return result

        return recorded


def main() -> int:
    """Run the script of an order on all ranks, and give the first code that is not 0."""
    order = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    sys.path.insert(0, str(Path(__file__).parent))
    import script_library_shims
    import script_shims

    assert script_library_shims  # its shims have their names now
    script_shims.install(order["shims"])
    import deepspeed

    script_shims.install_late(order["shims"], deepspeed)
    ranks: dict[int, int] = {}
    for rank in range(order["ranks"]):
        child = os.fork()
        if child == 0:
            be_rank(order, rank, deepspeed)
        ranks[child] = rank
    while ranks:
        child, status = os.wait()
        rank = ranks.pop(child)
        if status:
            for other in ranks:
                os.kill(other, signal.SIGKILL)
            print(f"rank {rank} ended with {os.waitstatus_to_exitcode(status)}")
            return rank + 1
    return 0


def be_rank(order: dict[str, Any], rank: int, deepspeed: Any) -> None:
    """Run the script as one rank, write its losses, and end the process."""
    out = Path(order["out"])
    log = os.open(out / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
    code = 1
    try:
        recorder = Recorder(order["losses"])
        recorder.watch(deepspeed)
        importlib.import_module("script_shims").join(order["shims"], deepspeed)
        run_script(order, rank)
        if not recorder.has_engine:
            raise RuntimeError("the script has trained without DeepSpeed")
        (out / f"rank{rank}.json").write_text(json.dumps(recorder.losses), encoding="utf-8")
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # what a script leaves open, such as loaders and servers, is not its result


def run_script(order: dict[str, Any], rank: int) -> None:
    """Run the script with its arguments, under the seeds of a rank."""
    script = Path(order["script"])
    sys.path[0] = str(script.parent)
    sys.path[1:1] = [str(Path(folder)) for folder in order["paths"]]
    sys.argv = [str(script), *order["arguments"]]
    if order["local_rank"]:
        sys.argv.insert(1, f"--local_rank={rank}")
    for file in script.parent.iterdir():
        if file.suffix == ".py" or file.is_dir():
            sys.modules.pop(file.stem, None)  # such as datasets, when the script has its own
    seed = 0 if order["same_seed"] else rank
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    try:
        if script.suffix == ".ipynb":
            run_notebook(script)
        else:
            runpy.run_path(str(script), run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise


def run_notebook(path: Path) -> None:
    """Run the code cells of a notebook, without lines for IPython."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    space: dict[str, Any] = {"__name__": "__main__"}
    for number, cell in enumerate(cells):
        if cell["cell_type"] == "code":
            lines = "".join(cell["source"]).splitlines()
            code = "\n".join("pass" if line.lstrip().startswith(("!", "%")) else line for line in lines)
            exec(compile(code, f"{path.name}[{number}]", "exec"), space)


if __name__ == "__main__":
    sys.exit(main())
