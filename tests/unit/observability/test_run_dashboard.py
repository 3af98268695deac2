"""The page of runs: who gets it from its server, what a frozen file holds, and who writes one."""

from __future__ import annotations

import http.client
import json
import re
from base64 import b64encode
from collections.abc import Iterator
from hashlib import sha256
from html.parser import HTMLParser
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from sample_runs import SampleRun, write_sample

from polyaccel.cli.main import main
from polyaccel.errors import PolyaccelError
from polyaccel.observability.dashboard.document import open_runs, write_page
from polyaccel.observability.dashboard.server import PageServer
from polyaccel.observability.metrics import StepMetrics
from polyaccel.observability.setup import ChosenMonitor, start_monitoring
from polyaccel.testkit.ranks.threads import run_threads

EVIL = "</script><script>alert(1)</script><!-- @SCRIPT@ \u2028"


class Page(HTMLParser):
    """The texts of a page's scripts and styles, by their id or kind, its policy, and what it asks others for."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.parts: dict[str, str] = {}
        self.policy = ""
        self.asked: list[str] = []
        self._inside = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        told = dict(attrs)
        self._inside = told.get("id", tag) if tag in ("script", "style") else ""
        if told.get("http-equiv") == "Content-Security-Policy":
            self.policy = told["content"]
        self.asked += [told[name] for name in ("src", "href") if name in told]

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.parts[self._inside] = self.parts.get(self._inside, "") + data


@pytest.fixture
def sample(tmp_path: Path) -> Iterator[SampleRun]:
    run = SampleRun(tmp_path / "run")
    run.add(3)
    yield run
    run.close()


@pytest.fixture
def server(sample: SampleRun) -> Iterator[PageServer]:
    made = PageServer(open_runs([sample.folder]))
    thread = Thread(target=made.serve)
    thread.start()
    yield made
    made.stop()
    thread.join(60)
    made.close()


def ask(server: PageServer, path: str, *, method: str = "GET", host: str | None = None) -> tuple[int, str, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.putrequest(method, path, skip_host=True)
    connection.putheader("Host", host or f"127.0.0.1:{server.port}")
    connection.endheaders()
    with connection.getresponse() as response:
        answer = response.status, response.read().decode(), response.headers
    connection.close()
    return answer


def test_the_page_and_its_news_are_there_for_those_with_the_token(server: PageServer, sample: SampleRun) -> None:
    base = server.url.removeprefix(f"http://127.0.0.1:{server.port}")
    status, page, headers = ask(server, base)
    assert (status, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    assert (headers["Cache-Control"], headers["Referrer-Policy"]) == ("no-store", "no-referrer")
    assert json.loads(Page(page).parts["data"]) == {"runs": None}
    status, text, _ = ask(server, f"{base}news?have=")
    first = json.loads(text)
    assert first["runs"][0]["last"]["step"] == 3
    assert json.loads(ask(server, f"{base}news?have={first['revision']}")[1]) == {}
    sample.add(1)
    assert json.loads(ask(server, f"{base}news?have={first['revision']}")[1])["runs"][0]["last"]["step"] == 4
    assert ask(server, base, host=f"localhost:{server.port}")[0] == 200


def test_nothing_else_is_there_for_anybody(server: PageServer) -> None:
    base = server.url.removeprefix(f"http://127.0.0.1:{server.port}")
    token = base.strip("/")
    wrong = ["/", f"/{token}", f"/{token[:-1]}/", f"/{token}x/", "/news", "//", f"//x/{token}/", "/%2e%2e/", "http://["]
    wrong += [
        base + rest for rest in ("..", "../..", "run.json", "news/..", "..%2frun.json", "page.css", "news/x", "/")
    ]
    wrong += [f"{base}../../../../../../etc/passwd", f"{base}%2e%2e/%2e%2e/etc/passwd"]
    for path in wrong:
        assert ask(server, path)[:2] == (403, "no\n"), path
    assert ask(server, base, host=f"evil.example:{server.port}")[0] == 403
    assert ask(server, base, host="127.0.0.1")[0] == 403
    assert ask(server, base, method="POST")[0] == 501
    other = PageServer([])
    assert other.url.split("/")[-2] != token
    other.close()


def test_it_listens_on_the_loopback_address_alone(server: PageServer) -> None:
    assert server._server.server_address[0] == "127.0.0.1"
    with pytest.raises(PolyaccelError) as caught:
        PageServer([], server.port)
    assert str(server.port) in str(caught.value)


def test_a_frozen_page_is_one_file_that_asks_for_nothing(tmp_path: Path) -> None:
    run = write_sample(tmp_path / "a", 30)
    SampleRun(tmp_path / "b", seed=2).close()
    run.log("error", EVIL)
    target = tmp_path / "both.html"
    assert main(["watch", str(tmp_path / "a"), str(tmp_path / "b"), "--export-html", str(target)]) == 0
    page = Page(target.read_text(encoding="utf-8"))
    runs = json.loads(page.parts["data"])["runs"]
    assert [(told["name"], told["last"]["step"]) for told in runs] == [("a", 30), ("b", None)]
    assert EVIL in [line["text"] for line in runs[0]["log"]]
    assert set(page.parts) == {"style", "data", "script"}
    assert page.asked == ["data:,"]
    for kind in ("script", "style"):
        digest = b64encode(sha256(page.parts[kind].encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in page.policy
    assert "default-src 'none'" in page.policy
    whole = page.parts["style"] + page.parts["script"]
    assert re.findall(r"https?://[^\s\"'`]+", whole) == ["http://www.w3.org/2000/svg"]
    assert "innerHTML" not in page.parts["script"]


def test_a_page_that_cannot_be_written_leaves_no_part(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], sample: SampleRun
) -> None:
    (tmp_path / "there.html").mkdir()
    assert main(["watch", str(sample.folder), "--export-html", str(tmp_path / "there.html")]) == 1
    assert "there.html cannot be written" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "there.html"]
    assert main(["watch", str(tmp_path / "there.html")]) == 1
    assert "is not a run's folder" in capsys.readouterr().err


def test_a_run_leaves_its_report_when_it_ends(tmp_path: Path) -> None:
    def train(communicator: Any) -> None:
        chosen = [ChosenMonitor("jsonl", "monitors.jsonl", {})]
        stream = start_monitoring(communicator, str(tmp_path), chosen, {"config": {"train_batch_size": 1}})
        stream.write(StepMetrics(step=1, loss=0.5, lr=(0.1,)))
        stream.close()

    run_threads(2, train)
    page = Page((tmp_path / "report.html").read_text(encoding="utf-8"))
    (told,) = json.loads(page.parts["data"])["runs"]
    assert (told["name"], told["state"], told["last"]["step"]) == (tmp_path.name, "ended", 1)
    assert told["facts"]["config"] == {"train_batch_size": 1}


def test_what_a_page_is_made_of_is_written_whole(tmp_path: Path, sample: SampleRun) -> None:
    write_page(tmp_path / "page.html", [sample.folder])
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert re.findall(r"@[A-Z]+@", text) == []
    assert [path.name for path in tmp_path.glob(".*")] == []
