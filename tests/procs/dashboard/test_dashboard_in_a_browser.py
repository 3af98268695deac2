"""The page in a real browser: it loads, follows a run, and can be read on a narrow screen and in the dark.

`make test-page` runs these; elsewhere they are skipped. With `PICTURES=docs/guide/pictures` it renews the pictures
of the guide.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from headless import Headless, find_browser
from sample_runs import SampleRun, write_sample

from polyaccel.observability.dashboard.document import open_runs, write_page
from polyaccel.observability.dashboard.server import PageServer

pytestmark = [
    pytest.mark.skipif(not os.environ.get("TESTS_PAGE"), reason="needs a browser: make test-page"),
    pytest.mark.skipif(find_browser() is None, reason="there is no Chromium on the path"),
]
MOST_PICTURE_NBYTES = 150_000
DRAWN = """document.querySelectorAll('.card').length
    && [...document.querySelectorAll('svg.chart')].every((one) => one.children.length)"""
CARDS = "[...document.querySelectorAll('.card')].map((card) => card.dataset.card)"
ALWAYS = ["loss", "lr"]
SAMPLE_CARDS = [
    *("loss", "norm", "scale", "lr", "tokens", "flops", "mfu"),
    *("phases.0", "purposes.0", "tiers.0", "waits-by-call.0", "sent-by-call.0"),
    *("rank-waits.0", "waits.0", "rank-times.0", "rank-memory.0", "ranks.0", "transfers.0"),
    *("balance.0", "experts.0.layers.1.mlp", "experts.0.layers.3.mlp", "trace.0", "trace-waits.0"),
    *("picture.0.pipeline.svg", "log.0", "config.0"),
]
CONTRAST = Path(__file__).with_name("contrast.js").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Headless]:
    program = find_browser()
    assert program is not None
    made = Headless(program, tmp_path_factory.mktemp("profile"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two runs that have ended, in which other ranks are slow."""
    home = tmp_path_factory.mktemp("runs")
    write_sample(home / "small")
    write_sample(home / "half-the-rate", lr=2e-4, slow=1, seed=3)
    return [home / "small", home / "half-the-rate"]


@pytest.fixture(autouse=True)
def no_console_error(browser: Headless) -> Iterator[None]:
    browser.console.clear()
    yield
    browser.run("1")  # what was told before is here
    assert browser.console == []


def frozen(folders: list[Path], tmp_path: Path) -> str:
    write_page(tmp_path / "page.html", folders)
    return (tmp_path / "page.html").as_uri()


def test_a_page_follows_its_run(browser: Headless, tmp_path: Path) -> None:
    run = SampleRun(tmp_path / "run")
    run.add(5)
    server = PageServer(open_runs([run.folder]))
    thread = Thread(target=server.serve)
    thread.start()
    step = "document.querySelector('.tile dd').textContent"
    points = "document.querySelector('[data-card=loss] .curve').getAttribute('d').match(/[ML]/g).length"
    try:
        browser.show(server.url)
        assert browser.wait_for(f"{step} === '5' && {points}") == 5
        assert "scale" in browser.run(CARDS)
        assert "log.0" in browser.run(CARDS)
        run.add(7)
        run.log("warning", "<img src=x onerror=console.error(1)> is text")
        with (run.folder / "metrics.jsonl").open("a") as file:
            file.write('{"step": 13, "loss"')
        assert browser.wait_for(f"{step} === '12' && {points}") == 12
        assert browser.wait_for("document.querySelector('.log').textContent.includes('<img')")
        assert browser.run("document.querySelectorAll('.log img').length") == 0
        assert browser.run("document.querySelector('.state').textContent") == "running"
        with (run.folder / "metrics.jsonl").open("a") as file:
            file.write(": 2.5}\n")
        browser.wait_for(f"{step} === '13'")
        run.end()
        browser.wait_for("document.querySelector('.state').textContent === 'ended'")
        browser.wait_for("document.querySelector('.picture img').naturalWidth")
    finally:
        server.stop()
        thread.join(60)
        server.close()
    browser.wait_for("document.getElementById('news').textContent.includes('has ended')")
    assert browser.run(step) == "13"
    assert all("ERR_CONNECTION_REFUSED" in told for told in browser.console), "the browser's own words"
    browser.console.clear()
    browser.show("about:blank")


def test_a_frozen_page_shows_all_that_a_run_has(browser: Headless, folders: list[Path], tmp_path: Path) -> None:
    browser.show(frozen(folders[:1], tmp_path))
    browser.wait_for(DRAWN)
    assert browser.run(CARDS) == SAMPLE_CARDS
    assert browser.run("document.querySelector('[data-card=\"waits.0\"] tbody tr').textContent").startswith("rank 0")


def test_what_a_run_has_no_records_of_is_left_out(browser: Headless, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 1, "loss": 2.0, "lr": [0.1]}\n{"step": 2, "loss": 1.5, "lr": [0.1]}\n'
    )
    browser.show(frozen([tmp_path], tmp_path))
    browser.wait_for(DRAWN)
    assert browser.run(CARDS) == ALWAYS


def test_memory_stands_beside_what_was_foretold(browser: Headless, tmp_path: Path) -> None:
    planned = {"parameters": 2 << 30, "gradients": 1 << 30, "optimizer states (host)": 4 << 30}
    records = [
        {
            "step": step,
            "loss": 2.0,
            "peak_memory_nbytes": 5 << 30,
            "memory_nbytes": {**planned, "in use": (4 << 30) + step * (1 << 26)},
            "planned_nbytes": planned if step == 1 else {},
        }
        for step in range(1, 11)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    browser.show(frozen([tmp_path], tmp_path))
    browser.wait_for(DRAWN)
    assert browser.run(CARDS) == ["loss", "purposes.0", "tiers.0"]
    legend = "[...document.querySelectorAll(`[data-card='%s'] .legend li`)].map((one) => one.textContent)"
    assert browser.run(legend % "purposes.0") == [
        *("last", "activations and the rest1.625 GiB", "gradients1 GiB", "parameters2 GiB"),
        *("the most in use5 GiB", "estimated, activations apart3 GiB"),
    ]
    assert browser.run(legend % "tiers.0") == [
        *("last", "optimizer states (host)4 GiB", "estimated4 GiB"),
    ]


def test_runs_stand_side_by_side(browser: Headless, folders: list[Path], tmp_path: Path) -> None:
    browser.show(frozen(folders, tmp_path))
    browser.wait_for(DRAWN)
    assert browser.run("document.querySelectorAll('[data-card=loss] .curve:not(.raw)').length") == 4
    assert browser.run("document.querySelectorAll('[data-card=comparison] tbody tr').length") == 2
    lefts = """['phases', 'rank-waits', 'waits'].map((name) => {
        const [one, other] = [0, 1].map((run) => document.querySelector(`[data-card='${name}.${run}']`));
        const [left, right] = [one.getBoundingClientRect(), other.getBoundingClientRect()];
        return [left.top === right.top, left.left < right.left]; })"""
    assert browser.run(lefts) == [[True, True]] * 3


def test_a_rank_has_one_colour_everywhere(browser: Headless, folders: list[Path], tmp_path: Path) -> None:
    browser.show(frozen(folders[:1], tmp_path))
    browser.wait_for(DRAWN)
    curves = """['rank-waits.0', 'rank-times.0', 'rank-memory.0'].map((name) =>
        [...document.querySelectorAll(`[data-card='${name}'] .curve:not(.raw)`)]
        .map((one) => getComputedStyle(one).stroke))"""
    dots = """[...document.querySelectorAll('[data-card="ranks.0"] .dot')]
        .map((one) => getComputedStyle(one).backgroundColor)"""
    colours = [*browser.run(curves), browser.run(dots)]
    assert len(set(colours[0])) == 4
    assert colours == [colours[0]] * 4


@pytest.mark.parametrize("width", [400, 1280])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_it_can_be_read(browser: Headless, folders: list[Path], tmp_path: Path, width: int, dark: bool) -> None:
    for shown in (folders[:1], folders):
        browser.show(frozen(shown, tmp_path), width=width, dark=dark)
        browser.wait_for(DRAWN)
        browser.run("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
        assert browser.run("document.documentElement.scrollWidth") == width
        outside = """[...document.querySelectorAll('.card, .tile, .chart, h2, h3, .legend')]
            .filter((one) => one.getBoundingClientRect().right > innerWidth).length"""
        assert browser.run(outside) == 0
        parts: list[dict[str, Any]] = browser.run(CONTRAST)
        assert len(parts) > 200
        assert [part for part in parts if part["ratio"] < (4.5 if part["kind"] == "text" else 3)] == []
        assert [part for part in parts if part["size"] < 12] == []
        grounds = browser.run("getComputedStyle(document.body).backgroundColor")
        assert grounds == ("rgb(18, 21, 26)" if dark else "rgb(246, 247, 249)")


def test_the_values_at_the_pointer_are_told(browser: Headless, folders: list[Path], tmp_path: Path) -> None:
    browser.show(frozen(folders[:1], tmp_path))
    browser.wait_for(DRAWN)
    at = browser.run(
        """(() => { const box = document.querySelector("[data-card=loss] .chart").getBoundingClientRect();
        return [box.left + box.width / 2, box.top + box.height / 2]; })()"""
    )
    browser.ask("Input.dispatchMouseEvent", type="mouseMoved", x=at[0], y=at[1])
    card = "document.querySelector('[data-card=loss]')"
    told = browser.wait_for(f"{card}.querySelector('.cross') && {card}.querySelector('.legend').textContent")
    assert told.startswith("step 1")
    browser.ask("Input.dispatchMouseEvent", type="mouseMoved", x=1, y=1)
    browser.wait_for("!document.querySelector('.cross')")


def test_charts_are_smoothed_zoomed_and_logarithmic_as_the_reader_chooses(
    browser: Headless, folders: list[Path], tmp_path: Path
) -> None:
    browser.show(frozen(folders[:1], tmp_path))
    browser.wait_for(DRAWN)
    texts = "[...document.querySelectorAll('[data-card=loss] .chart text')].map((one) => one.textContent)"
    curve = "[...document.querySelectorAll('[data-card=loss] .curve:not(.raw)')].map((one) => one.getAttribute('d'))[0]"
    plain, usual = browser.run(texts), browser.run(curve)
    assert "-0" not in plain
    assert len(plain) >= 7, "three ticks or more of each axis"
    browser.run("document.getElementById('log').click()")
    logarithmic = browser.run(texts)
    assert "by step, log scale" in logarithmic
    browser.run("document.getElementById('log').click()")
    assert browser.run(texts) == plain
    browser.run(
        """(() => { const it = document.getElementById('smoothing');
        it.value = 12; it.dispatchEvent(new Event('input')); })()"""
    )
    assert browser.run(curve) != usual
    box = browser.run(
        """(() => { const box = document.querySelector("[data-card=loss] .chart").getBoundingClientRect();
        return [box.left + box.width / 2, box.top + box.height / 2, box.width / 4]; })()"""
    )
    for kind, x in (("mousePressed", box[0]), ("mouseMoved", box[0] + 9), ("mouseReleased", box[0] + box[2])):
        browser.ask("Input.dispatchMouseEvent", type=kind, x=x, y=box[1], button="left", clickCount=1)
    browser.wait_for("!document.getElementById('whole').hidden")
    assert browser.run(texts) != plain
    browser.run("document.getElementById('whole').click()")
    assert browser.run(texts) == plain


@pytest.mark.parametrize(("rate", "has_exponents"), [(1e-3, False), (2e-4, True)])
def test_an_axis_has_one_notation(browser: Headless, tmp_path: Path, rate: float, has_exponents: bool) -> None:
    write_sample(tmp_path / "run", lr=rate)
    browser.show(frozen([tmp_path / "run"], tmp_path))
    browser.wait_for(DRAWN)
    labels = browser.run(
        """[...document.querySelectorAll("[data-card=lr] .chart text[text-anchor=end]")]
        .map((one) => one.textContent).filter((one) => /^[0-9].*[.e]/.test(one))"""
    )
    assert len(labels) >= 3
    assert {"e" in label for label in labels} == {has_exponents}


def test_a_phase_says_what_it_is(browser: Headless, folders: list[Path], tmp_path: Path) -> None:
    browser.show(frozen(folders[:1], tmp_path))
    browser.wait_for(DRAWN)
    helped = "[...document.querySelectorAll(`[data-card='phases.0'] .legend .helped`)]"
    assert browser.run(f"{helped}.length") > 4
    assert browser.run(f"{helped}.every((one) => one.title.length > 10)")


PICTURES = {
    "page": (1280, 760, False, 1),
    "page_of_ranks": (1180, 640, False, 1),
    "page_of_memory": (1180, 370, False, 1),
    "page_of_two_runs": (1280, 700, True, 2),
    "page_on_a_telephone": (400, 800, True, 1),
}
SCROLLED_TO = {"page_of_ranks": "rank-waits.0", "page_of_memory": "purposes.0"}


@pytest.mark.parametrize("name", PICTURES)
def test_pictures_for_the_guide(browser: Headless, folders: list[Path], tmp_path: Path, name: str) -> None:
    width, height, dark, count = PICTURES[name]
    browser.show(frozen(folders[:count], tmp_path), width=width, height=height, dark=dark)
    browser.wait_for(DRAWN)
    if card := SCROLLED_TO.get(name):
        browser.run(f"document.querySelector('[data-card=\"{card}\"]').scrollIntoView()")
    browser.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    target = Path(os.environ.get("PAGE_PICTURES") or tmp_path) / f"{name}.png"
    browser.picture(target)
    assert 10_000 < target.stat().st_size < MOST_PICTURE_NBYTES
