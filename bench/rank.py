"""One rank of a benchmark: `python -m bench.rank CASE VARIANT SETTINGS RESULT` calls `bench.cases.CASE.work`.

It writes the figures that `work` returns to RESULT.RANK as JSON. Standard library only: environments of peers have no
polyaccel.
"""

from __future__ import annotations

import json
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

_RANK_VARIABLES = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK")


def main(case: str, variant: str, settings: str, result: str) -> None:
    """Measure `variant`, and end the process without teardown if it trains with a peer."""
    figures = import_module(f"bench.cases.{case}").work(variant, json.loads(settings))
    rank = next((os.environ[name] for name in _RANK_VARIABLES if name in os.environ), "0")
    Path(f"{result}.{rank}").write_text(json.dumps(figures))
    dist: Any = sys.modules.get("torch.distributed")
    is_joined = dist is not None and dist.is_available() and dist.is_initialized()
    if is_joined:
        dist.barrier()
    if "polyaccel" not in sys.modules and "MPI" not in getattr(sys.modules.get("mpi4py"), "__dict__", ()):
        sys.stdout.flush()
        os._exit(0)  # FSDP2 and DeepSpeed sometimes abort or hang where gloo is taken down
    if is_joined:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
