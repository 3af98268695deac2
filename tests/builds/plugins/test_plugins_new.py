"""`polyaccel plugins new`: what it writes installs offline, passes its check and its own test, and is used by name."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from polyaccel.cli.main import main
from polyaccel.cli.plugins.new import KINDS, package_of

ROOT = Path(__file__).parents[3]
PIP = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-build-isolation"]
SETTINGS = {
    "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    "PIP_ROOT_USER_ACTION": "ignore",
    "POLYACCEL_MATRIX_KERNELS": "off",
}
TRAIN = """
import torch, polyaccel

torch.manual_seed(0)
model = torch.nn.Linear(4, 3)
config = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
    "zero_optimization": {"stage": STAGE},
}
engine, *_ = polyaccel.initialize(model=model, config=config)
for _ in range(5):
    loss = engine(torch.ones(2, 4)).square().mean()
    engine.backward(loss)
    engine.step()
if polyaccel.comm.get_rank() == 0:
    print(polyaccel.get_accelerator().name, polyaccel.comm.default_communicator().backend, loss.item())
"""


NAME, PAIR, OF_JAX = "acme", "bolt", "cog"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new plugin of every kind, each in a package and a folder of its own, one package of two kinds, and an
    accelerator of JAX; all installed below `site`."""
    folder = tmp_path_factory.mktemp("new")
    for kind in KINDS:
        assert main(["plugins", "new", NAME, "--kind", kind, "--folder", str(folder / kind)]) == 0
    pair = ["--kind", "accelerator", "--kind", "comm", "--folder", str(folder / PAIR)]
    assert main(["plugins", "new", PAIR, *pair]) == 0
    of_jax = ["--kind", "accelerator", "--framework", "jax", "--folder", str(folder / OF_JAX)]
    assert main(["plugins", "new", OF_JAX, *of_jax]) == 0
    sources = [str(folder / one) for one in (*KINDS, PAIR, OF_JAX)]
    subprocess.run(
        [*PIP, "--target", str(folder / "site"), *sources], check=True, timeout=400, env={**os.environ, **SETTINGS}
    )
    return folder


def run(folder: Path, *command: str, **environ: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("POLYACCEL_", "DS_"))}
    environment |= {**SETTINGS, **environ, "PYTHONPATH": str(folder / "site")}
    return subprocess.run(
        [sys.executable, "-m", *command], env=environment, capture_output=True, text=True, timeout=600, cwd=folder
    )


@pytest.mark.timeout(700)
@pytest.mark.parametrize("kind", KINDS)
def test_a_new_plugin_passes_its_check(kind: str, folder: Path) -> None:
    done = run(folder, "polyaccel", "plugins", "check", NAME, "--kind", kind, "--timeout", "200")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{NAME} of {package_of(NAME, [kind])} 0.1.0\n" in done.stdout
    assert " 0 failed, " in done.stdout
    if kind in ("monitor", "storage"):
        assert " 0 skipped in " in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80


@pytest.mark.timeout(700)
@pytest.mark.parametrize("kind", KINDS)
def test_a_new_plugin_passes_its_own_test(kind: str, folder: Path) -> None:
    tests = folder / kind / "tests"
    done = run(folder, "pytest", "-q", "-p", "no:cacheprovider", "-W", "error", "--rootdir", str(folder), str(tests))
    assert done.returncode == 0, done.stdout + done.stderr
    lines = next(tests.glob("test_*.py")).read_text().splitlines()
    code = [line for line in lines if line.strip() and not line.startswith(("from ", "import ", '"""'))]
    assert len(code) <= 15


def test_kinds_of_one_name_are_packages_of_their_own_unless_asked_for_together(folder: Path) -> None:
    packages = {path.name.partition("-0.1.0")[0] for path in (folder / "site").glob("*.dist-info")}
    assert packages == {
        *(package_of(NAME, [kind]).replace("-", "_") for kind in KINDS),
        *("polyaccel_bolt", "polyaccel_cog"),
    }
    text = (folder / PAIR / "pyproject.toml").read_text()
    assert (
        '[project.entry-points."polyaccel.accelerators"]\nbolt = "polyaccel_bolt.accelerator:BoltAccelerator"' in text
    )
    assert '[project.entry-points."polyaccel.comm"]\nbolt = "polyaccel_bolt.comm:BoltBackend"' in text


LAUNCHERS = {
    "polyaccel run": ["polyaccel", "run", "--nproc", "2"],
    "torchrun": ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("stage", [0, 3])
def test_training_runs_on_what_was_written(stage: int, launcher: str, folder: Path) -> None:
    """The accelerator's own comm backend is the one of its package."""
    script = folder / f"train{stage}.py"
    script.write_text(TRAIN.replace("STAGE", str(stage)))
    done = run(folder, *LAUNCHERS[launcher], str(script), DS_ACCELERATOR=PAIR)
    assert done.returncode == 0, done.stderr
    plain = run(folder, "polyaccel", "run", "--nproc", "2", str(script))
    assert plain.returncode == 0, plain.stderr
    (accelerator, backend, ours), (_, _, expected) = (one.stdout.splitlines()[-1].split()[-3:] for one in (done, plain))
    assert (accelerator, backend) == (PAIR, PAIR)
    # Its kernels are torch's, which round otherwise than our own on some processors.
    assert float(ours) == pytest.approx(float(expected), rel=1e-5)


def test_what_is_written_is_clean(folder: Path) -> None:
    sources = [str(path) for one in (*KINDS, PAIR, OF_JAX) for path in (folder / one).iterdir() if path.is_dir()]
    for action in (["check"], ["format", "--check"]):
        command = [str(Path(sys.executable).with_name("ruff")), *action, "--config", str(ROOT / "pyproject.toml")]
        done = subprocess.run([*command, "--no-cache", *sources], capture_output=True, text=True, timeout=280)
        assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("name", ["Acme", "9lives", "a b", "../acme", "acme-"])
def test_a_name_that_no_package_can_have_is_refused(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plugins", "new", name, "--kind", "storage", "--folder", str(tmp_path / "new")]) == 1
    assert f"{name!r} cannot be a plugin's name" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_nothing_is_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "README.md").write_text("mine")
    assert main(["plugins", "new", "acme", "--kind", "storage", "--folder", str(tmp_path)]) == 1
    assert "is not empty" in capsys.readouterr().err
    assert [file.name for file in tmp_path.iterdir()] == ["README.md"]


@pytest.mark.parametrize("name", ["cpu", "gloo", "file"])
def test_a_name_of_ours_is_refused(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins", "new", name, "--kind", "accelerator", "--folder", str(tmp_path / "new")]) == 1
    assert f"{name!r} is the name of the " in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
