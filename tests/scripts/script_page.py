"""docs/reference/public_scripts.md, from the table and the results."""

from __future__ import annotations

from typing import Any

HEAD = """# Public training scripts

`make test-scripts` runs training scripts of public repositories over `plugins/polyaccel-deepspeed`, on two CPU ranks.
The expected losses were recorded under DeepSpeed 0.19.8, with the same stand-ins, on the same kind of machine.
Scripts are fetched at a pinned commit when they run, and none is in this repository.

```text
make test-scripts MIRROR=FOLDER ARGS="--only minRF"
make test-examples MIRROR=FOLDER
make test-scripts ARGS="--record PYTHON"
```

`MIRROR` names folders with git directories. Without it they are cloned from GitHub. `--record` runs the real package
of that Python, and stores its losses as the expected ones.

Models are tiny and data drawn. The columns say what else is not the script's own. *Shims* replace what a CPU or a
newer library lacks, and none touches a line about DeepSpeed. *Smaller* counts the files in which sizes of models and
data were replaced. *Config* lists the keys of the DeepSpeed config that were set. They are batch sizes, offload, and
the precision where a script has no option for it.

"""
SHIMS = {
    "devices": "a CPU in place of each CUDA device, gloo in place of NCCL",
    "no_workers": "loaders read in the rank itself, so that random samples do not follow the number of devices",
    "fromstring": "numpy before 2.3",
    "drawn_images": "MNIST, FashionMNIST and CIFAR-10 are drawn",
    "text_datasets": "data sets of the hub are drawn",
    "old_transformers": "names and arguments that transformers 5 dropped",
    "old_timm": "modules of torch and timm of 2022",
    "old_torch": "names of torch 2.2",
    "on_cpus": "`use_cpu` and gloo in the arguments of the Trainer, and models that go to no device",
    "accelerate_on_cpus": "gloo in Accelerate's arguments",
    "lightning_on_cpus": "Lightning takes CPUs where it asks for CUDA devices",
    "streamed": "mosaicml-streaming, whose data are drawn",
    "sounds": "torchaudio and langid, whose waves are drawn",
    "videos": "decord, whose frames are drawn",
    "stocks": "yfinance, whose prices are drawn",
    "joined": "`deepspeed.comm` has met before the script, as Accelerate lets it meet where there are devices",
    "one_share": "ranks that share a model get the same batches, and Accelerate's schedules take one step",
    "qwen_tokenizer": "numbers of marks that Qwen's own tokenizer has",
    "absent": "a package that only reports, or that the run does not reach",
}


MESHES = """
## Trainers over ranks that share a model

`ARGS=--meshes` runs the trainers' scripts again, in fp32 at stage 1. Two ranks share the model and get the same
batches, and the losses are compared with those of one rank: 1e-6 is equal. A Mixtral takes the model's place where
ranks share experts, and a Switch Transformer where a script needs an encoder and a decoder.

LC-Rec names the class of a Llama, so no mixture can take its place. *Refused* is an error before the first step. Its
reason stands below the table.

Models and LoRA have no dropout here, on one rank too: ranks that share a model draw other masks. TRL computes losses
from the weight of `lm_head`, so tensor ranks keep words whole in its scripts. The losses of trl/dpo and trl/kto follow
from sums of log-probabilities that TRL adds up in fp32. One unit in the last place of such a sum is 1.1e-6 of the loss,
so 1e-5 is equal there.

In trl/grpo and trl/rloo each rank samples completions by a seed that follows from its rank. Here all ranks have the
seed of the first one, for their prompts are the same. The terms of trl/rloo's losses cancel, so their differences are
relative to 1.

"""
BEGIN, END = "<!-- tests/scripts: begin -->", "<!-- tests/scripts: end -->"


def counts(rows: list[dict[str, Any]], results: dict[str, Any], meshes: dict[str, Any]) -> str:
    """The part of docs/compatibility.md: public scripts, and trainers over meshes, by result.

    Args:
        rows: The table.
        results: What became of scripts.
        meshes: What became of trainers over meshes.

    Returns:
        Markdown, between its marks.
    """
    run = {row["name"]: row["repository"] for row in rows if row["name"] in results}
    newest = max((one["date"] for one in (*results.values(), *meshes.values()) if "date" in one), default="")
    lines = [
        f"{newest}: {len(run)} scripts of {len(set(run.values()))} projects, and {len(meshes)} runs of trainers on two",
        "ranks that share a model.",
        "",
        "| | all | equal | other losses | not finite | refused | failed |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for what, found in (("scripts", [results[name] for name in run]), ("trainers over meshes", [*meshes.values()])):
        kinds = [one["result"] for one in found]
        cells = [str(kinds.count(kind)) for kind in ("equal", "other losses", "not finite", "refused", "failed")]
        lines.append(f"| {what} | {len(kinds)} | " + " | ".join(cells) + " |")
    return "\n".join([BEGIN, *lines, END])


def put(text: str, part: str) -> str:
    """Return `text` with `part` between the marks."""
    before, _, rest = text.partition(BEGIN)
    return before + part + rest.partition(END)[2]


def page(
    rows: list[dict[str, Any]], expected: dict[str, Any], results: dict[str, Any], meshes: dict[str, Any] | None = None
) -> str:
    """The text of the page."""
    run = [row for row in rows if row["name"] in results]
    kinds = {"equal": 0, "other losses": 0, "failed": 0, "not finite": 0, "not comparable": 0}
    for row in run:
        kinds[results[row["name"]]["result"]] += 1
    counts = ", ".join(f"{count} {kind}" for kind, count in kinds.items() if count)
    projects = len({row["repository"] for row in run})
    newest = max((results[row["name"]]["date"] for row in run), default="")
    parts = [HEAD, f"{newest}: {len(run)} scripts of {projects} projects: {counts}.\n"]
    for group, title in (("scripts", "Scripts"), ("examples", "DeepSpeedExamples")):
        parts += [f"\n## {title}\n", _table([row for row in run if row["group"] == group], expected, results)]
    if notes := [f"- {row['name']}: {row['note']}" for row in run if "note" in row]:
        parts += ["\n## Scripts without the same losses\n", *notes]
    if meshes:
        parts += [MESHES + _table_of_meshes(meshes, [row["name"] for row in rows if "meshes" in row])]
    if waiting := [row["name"] for row in rows if row["name"] not in results]:
        parts += ["\n## Without a result so far\n", *(f"- {name}" for name in waiting)]
    parts += ["\n## Shims\n", "| shim | stands for |\n|---|---|"]
    parts += [f"| `{name}` | {meaning} |" for name, meaning in SHIMS.items()]
    parts += ["\n## Commits\n", "| repository | commit |\n|---|---|"]
    parts += sorted({f"| {row['repository']} | `{row['commit'][:12]}` |" for row in run})
    return "\n".join(parts) + "\n"


def _table_of_meshes(meshes: dict[str, Any], names: list[str]) -> str:
    """A row for each of `names` and of those with results, a column for each mesh."""
    kinds = ("tensor 2", "sequence 2", "pipeline 2", "expert 2")
    lines = ["| script | " + " | ".join(kinds) + " |", "|---" * (len(kinds) + 1) + "|"]
    reasons: list[str] = []
    for name in sorted({*names, *(key.rpartition(", ")[0] for key in meshes)}):
        cells = [meshes.get(f"{name}, {kind}") for kind in kinds]
        lines.append(f"| {name} | " + " | ".join(_of_mesh(cell, reasons) for cell in cells) + " |")
    return "\n".join([*lines, "", *(f"{number}. {why}" for number, why in enumerate(reasons, 1))])


def _of_mesh(cell: dict[str, Any] | None, reasons: list[str]) -> str:
    """What a cell says: the number of its reason, which stands below the table, too."""
    if cell is None:
        return "not run"
    if not (why := cell.get("why")):
        return _result(cell)
    if why not in reasons:
        reasons.append(why)
    return f"{_result(cell)} ({reasons.index(why) + 1})"


def _table(rows: list[dict[str, Any]], expected: dict[str, Any], results: dict[str, Any]) -> str:
    lines = [
        "| script | kind | shims | smaller | config | losses, first and last | result |",
        "|---|---|---|---:|---|---|---|",
    ]
    for row in sorted(rows, key=lambda row: row["name"]):
        shims = ", ".join(sorted({name.partition(":")[0] for name in row.get("shims", [])}))
        config = ", ".join(f"`{key}`" for keys in row.get("config", {}).values() for key in keys)
        first = expected.get(row["name"], [[]])[0]
        shown = f"{first[0]:.6f}, {first[-1]:.6f}" if first else ""
        cells = (row["name"], row["area"], shims, str(len(row.get("smaller", {})) or ""), config, shown)
        lines.append("| " + " | ".join((*cells, _result(results[row["name"]]))) + " |")
    return "\n".join(lines)


def _result(result: dict[str, Any]) -> str:
    if result["result"] not in ("equal", "other losses"):
        return str(result["result"])
    return f"{result['result']}, {result['apart']:.0e} apart" if result["apart"] else f"{result['result']}, to the bit"
