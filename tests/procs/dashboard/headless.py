"""A headless Chromium, driven over two pipes by its DevTools protocol: what a page shows, says on its console, and
looks like."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
LIMIT_S = 120.0


def find_browser() -> str | None:
    """The first browser of these names on the path."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Headless:
    """A browser with one tab. `console` has the errors and warnings that its pages have told."""

    def __init__(self, program: str, profile: Path) -> None:
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()

        def as_descriptors_3_and_4() -> None:
            high_in, high_out = os.dup(to_browser), os.dup(from_browser)
            os.dup2(high_in, 3)
            os.dup2(high_out, 4)

        command = [program, "--headless=new", "--remote-debugging-pipe", f"--user-data-dir={profile}", "--no-sandbox"]
        quiet = ["--disable-gpu", "--no-first-run", "--disable-dev-shm-usage", "--hide-scrollbars", "--lang=en"]
        quiet += ["--disable-background-networking", "--disable-extensions", "--disable-component-update"]
        quiet += ["--disable-lcd-text", "--force-color-profile=srgb"]  # pictures of fewer colours
        self._process = subprocess.Popen(
            [*command, *quiet, "about:blank"],
            preexec_fn=as_descriptors_3_and_4,
            pass_fds=(3, 4),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(to_browser)
        os.close(from_browser)
        self.console: list[str] = []
        self._number = 0
        self._unread = b""
        self._session: str | None = None
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.ask(f"{domain}.enable")

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The result of a call of the protocol. Raises RuntimeError with what the browser says is wrong."""
        self._number += 1
        number = self._number
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        end = monotonic() + LIMIT_S
        while True:
            told = self._next(end)
            if told.get("id") == number:
                if "error" in told:
                    raise RuntimeError(f"{method}: {told['error']}")
                result: dict[str, Any] = told["result"]
                return result
            self._note(told)

    def _next(self, end: float) -> dict[str, Any]:
        while b"\0" not in self._unread:
            ready, _, _ = select.select([self._read], [], [], max(0.0, end - monotonic()))
            data = os.read(self._read, 1 << 20) if ready else b""
            if not data:
                raise RuntimeError("the browser does not answer")
            self._unread += data
        message, _, self._unread = self._unread.partition(b"\0")
        told: dict[str, Any] = json.loads(message)
        return told

    def _note(self, told: dict[str, Any]) -> None:
        parameters = told.get("params", {})
        if told.get("method") == "Runtime.exceptionThrown":
            self.console.append(json.dumps(parameters["exceptionDetails"]))
        elif told.get("method") == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "warning", "assert"):
            self.console.append(json.dumps(parameters["args"]))
        elif told.get("method") == "Log.entryAdded" and parameters["entry"]["level"] in ("error", "warning"):
            self.console.append(json.dumps(parameters["entry"]))

    def show(self, url: str, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Open `url` in a window of that size, in the light or the dark scheme, at one pixel a point."""
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.ask("Emulation.setEmulatedMedia", features=[scheme])
        self.ask("Emulation.setTimezoneOverride", timezoneId="UTC")
        self.ask("Page.navigate", url=url)

    def run(self, script: str) -> Any:
        """The value of an expression, or of the promise that it is. Raises RuntimeError for what it throws."""
        told = self.ask("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in told:
            raise RuntimeError(json.dumps(told["exceptionDetails"]))
        return told["result"].get("value")

    def wait_for(self, condition: str) -> Any:
        """The value of the expression `condition` as soon as it is something; it is looked at in every frame."""
        return self.run(
            f"""new Promise((done, fail) => {{
                const end = performance.now() + {1000 * LIMIT_S / 2};
                const look = () => {{
                    let value = null;
                    try {{ value = ({condition}); }} catch (error) {{ value = null; }}
                    if (value) done(value);
                    else if (performance.now() > end) fail(new Error({json.dumps(condition)}));
                    else setTimeout(look, 20);
                }};
                look();
            }})"""
        )

    def picture(self, path: Path) -> None:
        """Write what the window shows as a PNG."""
        path.write_bytes(base64.b64decode(self.ask("Page.captureScreenshot", format="png")["data"]))

    def close(self) -> None:
        """End the browser and all its processes."""
        self._session = None
        with suppress(RuntimeError, OSError):
            self.ask("Browser.close")
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, 9)
            self._process.wait(20)
        os.close(self._write)
        os.close(self._read)
