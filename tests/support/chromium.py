"""A headless Chromium, controlled over a pair of pipes (DevTools protocol: JSON messages that end
with a zero byte).
"""

from __future__ import annotations

import itertools
import json
import os
import select
import subprocess
import tempfile
import time
from types import TracebackType
from typing import Any, Self

from tests.support.needs import program
from tests.support.waiting import HANG_SECS

_DISABLED = (
    "quic",
    "gpu",
    "background-networking",
    "component-update",
    "sync",
    "extensions",
    "breakpad",
    "dev-shm-usage",
    "features=Translate,MediaRouter,OptimizationHints",
)


class Chromium:
    """One browser with one page; closed with the block."""

    def __init__(self) -> None:
        self._program = program("chromium")
        self._numbers = itertools.count(1)
        self._text = b""
        self._session: str | None = None

    def __enter__(self) -> Self:
        self._profile = tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True)
        to_read, self._write_fd = os.pipe()
        self._read_fd, to_write = os.pipe()
        # The browser reads commands from descriptor 3 and writes replies to 4.
        shell = f'exec 3<&{to_read} 4>&{to_write}; exec "$@"'
        options = [
            "--headless",
            "--no-sandbox",
            "--no-first-run",
            "--hide-scrollbars",
            "--remote-debugging-pipe",
        ]
        options += [f"--disable-{one}" for one in _DISABLED]
        self._process = subprocess.Popen(
            [
                program("bash"),
                "-c",
                shell,
                "chromium",
                self._program,
                *options,
                f"--user-data-dir={self._profile.name}",
            ],
            pass_fds=(to_read, to_write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_read)
        os.close(to_write)
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        os.close(self._write_fd)  # without commands the browser ends
        os.close(self._read_fd)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._profile.cleanup()

    def open(self, url: str, *, width: int = 1100, height: int = 800, dark: bool = False) -> None:
        """Open a page."""
        self._call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self._call("Emulation.setEmulatedMedia", features=scheme)
        answer = self._call("Page.navigate", url=url)
        assert "errorText" not in answer, answer
        self.evaluate(
            "new Promise((done) => document.readyState === 'complete' ? done() :"
            " addEventListener('load', done))"
        )

    def evaluate(self, expression: str) -> Any:
        """Return the value of an expression in the page, or of its promise."""
        answer = self._call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait_until(self, condition: str) -> None:
        """Wait until an expression is true; it is evaluated after each change of the page."""
        self.evaluate(
            f"new Promise((done) => {{ const check = () => {{ if ({condition}) {{"
            " observer.disconnect(); done(); } };const observer = new"
            " MutationObserver(check);observer.observe(document, { subtree: true, childList:"
            " true, attributes: true, characterData: true }); check(); })"
        )

    def press(self, key: str, text: str = "") -> None:
        """Press and release a key; `text` is what it enters."""
        self._call("Input.dispatchKeyEvent", type="keyDown", key=key, code=key, text=text)
        self._call("Input.dispatchKeyEvent", type="keyUp", key=key, code=key)

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write_fd, json.dumps(message).encode() + b"\0")
        until = time.monotonic() + HANG_SECS
        while True:
            *whole, self._text = self._text.split(b"\0")
            for one in whole:
                answer = json.loads(one)
                if answer.get("id") == number:
                    assert "error" not in answer, f"{method}: {answer}"
                    result: dict[str, Any] = answer["result"]
                    return result
            assert select.select([self._read_fd], [], [], max(0, until - time.monotonic()))[0], (
                f"{method}: no answer"
            )
            more = os.read(self._read_fd, 1 << 16)
            assert more, f"the browser has ended: {self._process.wait()}"
            self._text += more
