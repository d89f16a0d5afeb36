"""A headless Chromium, driven over a pipe (the DevTools protocol), with nothing but the standard library."""

from __future__ import annotations

import base64
import itertools
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any, Self

import pytest

CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
)
NO_BROWSER = "no Chromium"
"""Why a browser test was skipped."""
CUT = """
[...document.querySelectorAll('main *')].filter(
  (one) => one.getBoundingClientRect().right > innerWidth + 1 && !one.closest('.scroll')
).length
"""
"""Number of a page's elements that reach beyond it, but for those in a box that scrolls."""
RIGHT = """
[...document.querySelectorAll('table th')].find((one) => one.firstChild.textContent === '{title}')
  .getBoundingClientRect().right
"""
"""Where the first table with a column of a title has it: its right edge, in pixels."""
_FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-dev-shm-usage"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--remote-debugging-pipe"),
)


def require_chromium() -> None:
    """Skips the test without a Chromium on the PATH, or fails it if FEDGUILD_BROWSER is `required`."""
    if CHROMIUM is None:
        if os.environ.get("FEDGUILD_BROWSER") == "required":
            pytest.fail(f"FEDGUILD_BROWSER=required, but {NO_BROWSER} is on the PATH.")
        pytest.skip(NO_BROWSER)


class Browser:
    """One page in a browser of its own; use it in a `with` block."""

    def __init__(self, profile: Path, seconds: float = 60.0) -> None:
        assert CHROMIUM is not None
        self._seconds, self._numbers = seconds, itertools.count(1)
        self._rest, self._session = b"", ""
        self.problems: list[str] = []
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        command = [CHROMIUM, *_FLAGS, f"--user-data-dir={profile}", "about:blank"]
        shell = f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}'
        self._process = subprocess.Popen(
            ["bash", "-c", shell, "bash", *command],
            pass_fds=(theirs_in, theirs_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)

    def __enter__(self) -> Self:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._in)
        os.close(self._out)

    def show(self, width: int, *, dark: bool = False, height: int = 900) -> None:
        """Sets the page's width in pixels, and its colour scheme."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)

    def value(self, expression: str) -> Any:
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait_for(self, condition: str) -> float:
        """Waits until a JavaScript expression is true; returns the seconds that it took."""
        started = time.monotonic()
        while not self.value(f"(() => {{ try {{ return Boolean({condition}) }} catch {{ return false }} }})()"):
            assert time.monotonic() - started < self._seconds, f"not true after {self._seconds:g} s: {condition}"
            time.sleep(0.02)
        return time.monotonic() - started

    def screenshot(self, path: Path) -> Path:
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": min(size["height"], 6000), "scale": 1}
        image = self.call("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)["data"]
        path.write_bytes(base64.b64decode(image))
        return path

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Returns the answer to a command of the protocol."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters}
        os.write(
            self._out,
            json.dumps({**message, **({"sessionId": self._session} if self._session else {})}).encode() + b"\0",
        )
        while True:
            answer = self._message()
            if answer.get("id") == number:
                assert "error" not in answer, answer["error"]
                return dict(answer["result"])
            self._note(answer)

    def _note(self, event: dict[str, Any]) -> None:
        """Keeps what went wrong on the page: exceptions, refused content, errors on the console."""
        parameters = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(parameters["exceptionDetails"])[:600])
        elif event.get("method") == "Log.entryAdded" and parameters["entry"]["level"] == "error":
            self.problems.append(parameters["entry"]["text"])

    def _message(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._in], [], [], self._seconds)
            assert ready, "the browser does not answer"
            received = os.read(self._in, 1 << 20)
            assert received, "the browser has ended"
            self._rest += received
        whole, _, self._rest = self._rest.partition(b"\0")
        return dict(json.loads(whole))
