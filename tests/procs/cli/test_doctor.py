"""`polyaccel doctor` and `polyaccel plugins` on a machine that is ill: they report, and never fall ill themselves."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from throwaway import Distribution, install, python

from polyaccel.offload.tier import Tier

LOUD = 'print("hello from the plugin")\nraise OSError("no such bus")\n'
VERB = """
import sys
from polyaccel.cli.main import main
code = main({arguments!r})
print(*(name for name in ("torch", "jax", "rich") if sys.modules.get(name)), file=sys.stderr)
sys.exit(code)
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plugin that prints and then fails when imported, and two packages that offer the same name."""
    site = tmp_path_factory.mktemp("plugins") / "site"
    twins = [
        Distribution(f"acme_{name}", "1.0", "", {"polyaccel.comm": {"wire": f"acme_{name}:Wire"}}) for name in "ab"
    ]
    install(site, Distribution("acme_loud", "0.3", LOUD, {"polyaccel.tiers": {"loud": "acme_loud:Loud"}}), *twins)
    return site


def run(*arguments: str, site: Path, cache: Path, before: str = "") -> subprocess.CompletedProcess[str]:
    return python(before + VERB.format(arguments=arguments), site, cache=cache, check=False)


def doctor(site: Path, cache: Path, before: str = "") -> dict[str, Any]:
    """The report as JSON."""
    done = run("doctor", "--json", site=site, cache=cache, before=before)
    try:
        report: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        raise AssertionError(f"exit {done.returncode}\n{done.stdout}\n{done.stderr}") from None
    assert done.returncode == (0 if report["can_train"] and report["nothing_broken"] else 1)
    assert report["can_train"] == (report["problems"] == [])
    return report


def rows(report: dict[str, Any], group: str) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in report["plugins"] if row["group"] == f"polyaccel.{group}"}


def test_broken_plugins_are_rows_with_package_version_and_traceback(site: Path, tmp_path: Path) -> None:
    report = doctor(site, tmp_path)
    loud, device = rows(report, "tiers")["loud"], rows(report, "tiers")["device"]
    assert not report["nothing_broken"]
    assert report["can_train"], "neither of the broken ones would be used"
    assert (device["state"], device["package"], device["api_version"]) == (
        "usable",
        "polyaccel",
        list(Tier.API_VERSION),
    )
    assert (loud["state"], loud["package"], loud["version"]) == ("broken", "acme_loud", "0.3")
    assert loud["traceback"].endswith('line 2, in <module>\n    raise OSError("no such bus")\nOSError: no such bus\n')
    wires = [row for row in report["plugins"] if row["name"] == "wire"]
    assert [row["package"] for row in wires] == ["acme_a", "acme_b"]
    assert all("acme_a:Wire of acme_a 1.0 and acme_b:Wire of acme_b 1.0" in row["reason"] for row in wires)


def test_a_machine_with_only_our_own_plugins_can_train(tmp_path: Path) -> None:
    report = doctor(tmp_path, tmp_path)
    assert {row["name"]: row["reason"] for row in report["plugins"] if row["state"] == "broken"} == {}
    assert report["can_train"]
    assert report["nothing_broken"]
    assert set(report["comm"].values()) <= {
        name for name, row in rows(report, "comm").items() if row["state"] == "usable"
    }
    assert rows(report, "accelerators")[report["accelerator"]]["state"] == "usable"


def test_an_accelerator_that_cannot_be_chosen_is_said_with_the_reason(tmp_path: Path) -> None:
    report = doctor(tmp_path, tmp_path, before="import os\nos.environ['DS_ACCELERATOR'] = 'abacus'\n")
    assert (report["can_train"], report["accelerator"]) == (False, None)
    assert "'abacus'" in report["problems"][0]


PARTLY = """
from polyaccel.accelerators.base import Accelerator
from polyaccel.accelerators.cpu import CpuAccelerator
from polyaccel.core.types import Probe

class Apart(CpuAccelerator):
    API_VERSION = (3, 0)
    name = "apart"
    torch_device_type = None
    import_array = Accelerator.import_array
    @classmethod
    def probe(cls):
        return Probe(True, "in a drawer", priority=-1)

class Jax(Apart):
    API_VERSION = (3, 0)
    name = "jaxen"
    jax_platform = "cpu"
"""


def test_an_accelerator_that_no_torch_module_trains_on_is_said_to_be_so(tmp_path: Path) -> None:
    names = {name: f"acme_partly:{cls}" for name, cls in (("apart", "Apart"), ("jaxen", "Jax"))}
    install(tmp_path / "site", Distribution("acme_partly", "1.0", PARTLY, {"polyaccel.accelerators": names}))
    chosen = "import os\nos.environ['DS_ACCELERATOR'] = {!r}\n"
    report = doctor(tmp_path / "site", tmp_path, before=chosen.format("apart"))
    apart, jaxen = (rows(report, "accelerators")[name] for name in ("apart", "jaxen"))
    assert (apart["state"], jaxen["state"]) == ("partly", "partly")
    assert "in a drawer; no torch module trains on it, torch_device_type is None; and JAX cannot" in apart["reason"]
    assert "; functions of JAX train on it" in jaxen["reason"]
    assert not report["can_train"]
    assert report["problems"][0].startswith("accelerator 'apart' trains models of no framework")
    without_jax = chosen.format("jaxen") + "import sys\nsys.modules['jax'] = None\n"
    report = doctor(tmp_path / "site", tmp_path, before=without_jax)
    assert report["problems"] == ["accelerator 'jaxen' trains models of jax; installed: torch"]


@pytest.mark.parametrize(
    ("before", "problem"),
    [
        (
            "import os\nos.environ['POLYACCEL_COMM'] = 'nccl'\n",
            "comm backend 'nccl' cannot be used: ",  # torch is built without it, or there is no GPU
        ),
        (
            "import os\nos.environ['POLYACCEL_COMM'] = 'wire'\n",
            "comm backend 'wire' cannot be used: comm backend 'wire' is",
        ),
        ("import os\nos.environ['POLYACCEL_COMM'] = 'pigeon'\n", "no comm backend is called 'pigeon'"),
        ("import sys\nsys.modules['torch'] = sys.modules['jax'] = None\n", "neither torch nor jax is installed"),
    ],
)
def test_a_combination_that_cannot_train_is_said(before: str, problem: str, site: Path, tmp_path: Path) -> None:
    report = doctor(site, tmp_path, before=before)
    assert len(report["problems"]) == 1
    assert report["problems"][0].startswith(problem)
    text = run("doctor", site=site, cache=tmp_path, before=before)
    assert text.returncode == 1
    assert text.stdout.startswith("NOT READY")
    assert f"\ncannot train: {problem[:40]}" in text.stdout


def test_the_mpi_that_is_there_is_named_and_not_started(tmp_path: Path) -> None:
    """By the file's name, and what stands in it: nothing is loaded."""
    for folder, name, text in (
        ("open", "libmpi.so.40", ""),
        ("intel", "libmpi.so.12", "... Intel(R) MPI Library ..."),
        ("mvapich", "libmpi.so.12", "MVAPICH2 Version"),
        ("mpich", "libmpi.so.12", "MPICH Version"),
    ):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).write_text(f"\x7fELF {text}")
    folders = ":".join(str(tmp_path / folder) for folder in ("open", "intel", "mvapich", "mpich"))
    before = f"import os, sys\nos.environ['LD_LIBRARY_PATH'] = {folders!r}\nsys.modules['mpi4py'] = None\n"
    found = doctor(tmp_path, tmp_path, before=before)["libraries"]["MPI"]
    for flavour, folder in (("Open MPI", "open"), ("Intel MPI", "intel"), ("MVAPICH", "mvapich"), ("MPICH", "mpich")):
        assert f"{flavour} ({tmp_path / folder}/libmpi.so" in found


def test_the_text_fits_eighty_columns_and_shows_tracebacks_only_when_asked(site: Path, tmp_path: Path) -> None:
    short = run("doctor", site=site, cache=tmp_path)
    long = run("doctor", "-v", site=site, cache=tmp_path)
    assert (short.returncode, long.returncode) == (1, 1), "something that is installed is broken"
    assert short.stdout.startswith("OK: trains on cpu with torch "), "what is broken is not what would be used"
    too_wide = [line for line in short.stdout.splitlines() if len(line) > 80 and " " in line.strip()]
    assert too_wide == []
    assert re.search(r"\nbroken: .*\bloud of acme_loud 0\.3: ", short.stdout)
    assert len(short.stdout.splitlines()) < 20
    assert "  broken  loud    acme_loud 0.3\n" in long.stdout
    assert "  usable  device  polyaccel " in long.stdout
    assert "Traceback" not in short.stdout
    assert "          OSError: no such bus\n" in long.stdout
    assert "hello from the plugin" not in short.stdout + long.stdout
    assert "hello from the plugin" in short.stderr


def test_no_framework_is_imported(site: Path, tmp_path: Path) -> None:
    assert run("doctor", site=site, cache=tmp_path).stderr.splitlines()[-1] == ""
    assert run("plugins", site=site, cache=tmp_path).stderr.splitlines() == [""]


def test_it_runs_with_the_standard_library_alone(site: Path, tmp_path: Path) -> None:
    hidden = ["stevedore", "rich", "torch", "jax", "numpy", "pydantic", "pydantic_core", "safetensors"]
    report = doctor(site, tmp_path, before=f"import sys\nsys.modules.update(dict.fromkeys({hidden}))\n")
    device = rows(report, "tiers")["device"]
    assert device["state"] == "broken"
    assert device["reason"].startswith("no plugin can be loaded without stevedore: ")
    assert device["hint"] == "pip install 'stevedore>=5.10'"
    assert not report["can_train"]
    assert report["packages"]["polyaccel"]


def test_a_room_of_ours_that_cannot_be_imported_is_reported_and_the_others_are_probed(
    site: Path, tmp_path: Path
) -> None:
    report = doctor(site, tmp_path, before="import sys\nsys.modules['polyaccel.offload.tier'] = None\n")
    assert set(report["groups_not_probed"]) == {"polyaccel.tiers"}
    assert "polyaccel.offload.tier" in report["groups_not_probed"]["polyaccel.tiers"]
    assert {row["reason"] for row in rows(report, "tiers").values()} == {"not probed"}
    assert rows(report, "comm")["local"]["state"] == "usable"
    assert not report["nothing_broken"]


def test_the_machine_and_what_matters_of_the_environment_are_shown(site: Path, tmp_path: Path) -> None:
    before = "import os\nos.environ.update(RANK='1', POLYACCEL_COMM='gloo', DS_ACCELERATOR='cpu', SECRET='hush')\n"
    report = doctor(site, tmp_path, before=before)
    assert {"RANK": "1", "POLYACCEL_COMM": "gloo", "DS_ACCELERATOR": "cpu"}.items() <= report["environment"].items()
    assert "SECRET" not in report["environment"]
    (problem,) = report["problems"]  # a program started here would read them, and fail
    assert "WORLD_SIZE not set" in problem
    facts = {"python", "platform", "processor", "features", "cores", "memory", "/dev/shm", "limits"}
    facts |= {"kernels", "matrix kernels"}
    assert set(report["machine"]) == facts
    assert not any(fact.startswith("unknown") for fact in report["machine"].values())


def test_the_launcher_that_counts_is_said_beside_what_others_see(tmp_path: Path) -> None:
    variables = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "SLURM_JOB_ID": "7", "SLURM_NTASKS": "2"}
    before = f"import os, sys\nos.environ.update({variables})\nsys.modules['mpi4py'] = None\n"
    launcher = doctor(tmp_path, tmp_path, before=before)["launcher"]
    assert launcher["matched"] == "MPI"
    assert launcher["MPI"].startswith("Open MPI: OMPI_COMM_WORLD_RANK=1, OMPI_COMM_WORLD_SIZE=2")
    assert launcher["Slurm"] == "job 7 of 2 tasks, but srun did not start this process"
    assert launcher["torchrun variables"].startswith("RANK unset, WORLD_SIZE unset")
    alone = run("doctor", "-v", site=tmp_path, cache=tmp_path).stdout
    assert "\nlauncher\n  matched               none: a program started here is one process\n" in alone


def test_a_terminal_without_unicode_is_no_reason_to_fail(site: Path, tmp_path: Path) -> None:
    before = "import os, sys\nos.environ['RANK'] = 'zw\\u00f6lf'\nsys.stdout.reconfigure(encoding='ascii')\n"
    assert r"zw\xf6lf" in run("doctor", "-v", site=site, cache=tmp_path, before=before).stdout


def test_plugins_lists_all_and_imports_none(site: Path, tmp_path: Path) -> None:
    text = run("plugins", site=site, cache=tmp_path)
    assert text.returncode == 0
    listed_text = re.sub(" {2,}", "  ", text.stdout)
    assert "\npolyaccel.tiers\n  device  polyaccel " in listed_text
    assert "  loud  acme_loud 0.3  acme_loud:Loud\n" in listed_text
    assert "hello" not in text.stdout + text.stderr
    listed = json.loads(run("plugins", "list", "--json", site=site, cache=tmp_path).stdout)
    wire = {"group": "polyaccel.comm", "name": "wire", "package": "acme_b", "version": "1.0", "value": "acme_b:Wire"}
    assert wire in listed
