"""What becomes of every name and config key of DeepSpeed 0.19.8, from the table that the drop-in's modules are made of.

`python docs/generate/compatibility.py` prints the page.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "plugins" / "polyaccel-deepspeed"))

from polyaccel_deepspeed.names.entry import Status
from polyaccel_deepspeed.names.internals import MEMBERS_ABSENT
from polyaccel_deepspeed.names.surface import MODULES
from polyaccel_deepspeed.refused_keys import REMOVED

from polyaccel.config import Config
from polyaccel.config.keys import walk_keys
from polyaccel.config.unsupported_keys import ABSENT, BELOW, Absent

_INTRODUCTION = """\
# Scripts written for DeepSpeed

`plugins/polyaccel-deepspeed` is a distribution named `deepspeed`, for scripts and trainers that import it. This page
lists the status of the public names and of every config key of DeepSpeed 0.19.8. It is made from the tables that the
package itself uses. A test compares those with the names, arguments and keys of an installed DeepSpeed 0.19.8. A name
is public in a package that collects names for users, such as `deepspeed.utils`, and in the module that defines it.

| status | meaning |
|---|---|
| yes | does what it does in DeepSpeed |
| accepted | can be used and has no effect, for the given reason; for a config key the log reports it |
| not yet | can be imported, and raises when it is used; a config that asks for it is refused |
| never | likewise, and there is no plan for it |

Trainers that run over it, unmodified, on two CPU ranks, with the losses of the same job in plain torch within 1e-5
(`make test-dropin`):

- **Accelerate** by `accelerate launch --use_deepspeed`, stages 0 to 3: accumulation, clipping, schedules, states in
  host memory, `save_state`, `load_state`, `get_state_dict`. On CPU ranks `Accelerator` needs
  `InitProcessGroupKwargs(backend="gloo")`.
- **transformers' `Trainer`** with a config of "auto"s, stages 2 and 3: train, evaluate, save, resume. On CPU ranks its
  arguments need `use_cpu=True, ddp_backend="gloo"`.
- **TRL's `SFTTrainer`**, with PEFT's LoRA and without, stages 2 and 3: losses, and the adapters or weights it saves.

The scripts of `examples/deepspeed`, written for DeepSpeed's API alone (CIFAR-10, a BERT's pre-training, a first loop
with checkpoints), start by the command `deepspeed` and have the losses of the same jobs in plain torch within 1e-5 too.

DeepSpeed 0.19.8 itself, in a separate environment on the same machine, has the same losses as ours (2026-11-22, two
CPU ranks, fp32, torch 2.13.0). The command is `python -m torch.distributed.run --nproc-per-node 2 SCRIPT --losses FILE`
with either:

| script | stage | steps | ours, first and last | DeepSpeed | apart at most |
|---|---|---|---|---|---|
| `cifar10_deepspeed.py` | 2 | 12 | 2.301745, 2.265416 | 2.301745, 2.265416 | 1.1e-7 |
| `bert_pretraining.py` | 3 | 10 | 29.576561, 12.830463 | 29.576561, 12.830463 | 1.9e-7 |
| `hello_deepspeed.py` | 1 | 10 | 4.157987, 3.993464 | 4.157987, 3.993464 | 1.2e-7 |

Layers of experts (`deepspeed.moe.layer.MoE`) choose the same experts for the same tokens under the same seed. They
were compared with one, two and three choices, with and without dropping, sampling, jitter and a residual, and on two
ranks that share experts, or do not. Their losses are 1.9e-7 apart at most, their norms 1.1e-7 (2026-11-23, six steps of
SGD, clipped).

Lightning's DeepSpeed strategies refuse every accelerator but CUDA before they import anything; they were not run.
"""


def compatibility() -> str:
    """The page, as Markdown."""
    return "\n".join([_INTRODUCTION, *_names(), *_members(), *_keys()])


def _names() -> Iterator[str]:
    yield "## Names { #names }\n"
    for module, entry in MODULES.items():
        if not entry.names:
            continue
        yield f"### `{module}` {{ #{module} }}\n"
        yield f"{entry.doc}\n\n| name | status | |\n|---|---|---|"
        for name, one in sorted(entry.names.items(), key=lambda item: (list(Status).index(item[1].status), item[0])):
            yield f"| `{name}` | {one.status.value} | {one.why} |"
        yield ""


def _members() -> Iterator[str]:
    for owner, absent in MEMBERS_ABSENT.items():
        yield f"## `{owner}` {{ #{owner}-members }}\n"
        yield "Every public member exists, with DeepSpeed's arguments, except for these, which are an AttributeError:\n"
        yield "| member | status | |\n|---|---|---|"
        for name, one in absent.items():
            yield f"| `{name}` | {one.status.value} | {one.why} |"
        yield ""


def _keys() -> Iterator[str]:
    yield "## Config keys { #keys }\n"
    yield "[The reference](reference/config.md) explains each key.\n\n| key | status | |\n|---|---|---|"
    found = {
        key.dotted: ("yes", "")
        for key in walk_keys(Config)
        if not key.is_section and "polyaccel's own" not in (key.field.description or "")
    }
    for entry in ABSENT:
        for pattern in entry.keys:
            key = pattern.removesuffix(BELOW)
            found[key] = _absent(entry)
    found |= {key: ("never", f"{feature}, which DeepSpeed has removed") for key, feature in REMOVED.items()}
    for key in sorted(found):
        status, why = found[key]
        yield f"| `{key}` | {status} | {why} |"


def _absent(entry: Absent) -> tuple[str, str]:
    if entry.is_tuning:
        return "accepted", entry.feature
    return "not yet", entry.feature


if __name__ == "__main__":
    print(compatibility())
