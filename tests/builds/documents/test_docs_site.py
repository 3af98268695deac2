"""The documentation builds without a warning, and its pages have what is made from the project."""

from __future__ import annotations

import html
import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from polyaccel_deepspeed.names.surface import MODULES

from polyaccel.config import Config
from polyaccel.config.keys import walk_keys
from polyaccel.config.unsupported_keys import ABSENT, absent_keys
from polyaccel.errors import CommTimeout

ROOT = Path(__file__).parents[3]

pytestmark = [
    pytest.mark.skipif(find_spec("mkdocs") is None, reason="mkdocs is not installed (pip install '.[docs]')"),
    pytest.mark.timeout(700),
]


def build(config: Path, site: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--config-file", str(config), "--site-dir", str(site)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    site = tmp_path_factory.mktemp("site")
    done = build(ROOT / "mkdocs.yml", site)  # strict: a warning is exit code 1
    assert done.returncode == 0, done.stdout + done.stderr
    return site


def text_of(page: Path) -> str:
    return html.unescape(re.sub(r"<[^>]*>", "", page.read_text(encoding="utf-8")))


def test_every_key_stands_in_the_reference_absent_ones_too(site: Path) -> None:
    page = (site / "reference" / "config" / "index.html").read_text(encoding="utf-8")
    assert [key.dotted for key in walk_keys(Config) if f'id="{key.dotted}"' not in page] == []
    text = " ".join(text_of(site / "reference" / "config" / "index.html").split())
    assert [key for key in absent_keys() if key not in text] == []
    ends = {entry.feature: "." if entry.is_tuning else ". Cure: " for entry in ABSENT}
    assert [feature for feature, end in ends.items() if f": {feature}{end}" not in text] == []


def test_the_page_about_deepspeed_has_every_name_and_every_key_of_it(site: Path) -> None:
    text = " ".join(text_of(site / "compatibility" / "index.html").split())
    rows = {f"{name} {one.status.value}" for entry in MODULES.values() for name, one in entry.names.items()}
    assert [row for row in sorted(rows) if f" {row} " not in text] == []
    facts = json.loads((ROOT / "tests" / "unit" / "dropin" / "deepspeed_facts.json").read_text(encoding="utf-8"))
    assert [key for key in facts["keys"] if f" {key} " not in text] == []


def test_the_reference_has_types_and_defaults(site: Path) -> None:
    text = " ".join(text_of(site / "reference" / "config" / "index.html").split())
    assert 'train_batch_size integer > 0 or null or "auto" · default null' in text
    assert "stage 0 or 1 or 2 or 3 · default 0" in text
    assert "betas list of 2: number ≥ 0, < 1 each · default [0.9, 0.999]" in text


def test_the_api_has_signatures_and_docstrings(site: Path) -> None:
    text = " ".join(text_of(site / "reference" / "api" / "index.html").split())
    assert " ".join(str(CommTimeout.__doc__).split()) in text
    for signature in ("save_checkpoint( save_dir: str", "init_distributed( dist_backend: str | None = None"):
        assert signature in text
    assert "memory_stats" in text_of(site / "reference" / "contracts" / "index.html")


def test_the_support_table_is_put_in(site: Path) -> None:
    text = text_of(site / "support" / "index.html")
    assert "not run on hardware" in text
    assert "<!--" not in text


def test_a_broken_link_fails_the_build(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text("[nowhere](nowhere.md)")
    own = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    kept = own[own.index("validation:") : own.index("nav:")]
    (tmp_path / "mkdocs.yml").write_text(f"site_name: x\nstrict: true\n{kept}")
    done = build(tmp_path / "mkdocs.yml", tmp_path / "site")
    assert done.returncode == 1
    assert "nowhere.md" in done.stderr
