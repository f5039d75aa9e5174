"""The example of a web service: a process that gets HTTP requests and signals, and whose page a
browser shows.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import processes
from tests.support.checkpoint_files import saved_step
from tests.support.chromium import Chromium
from tests.support.source import ROOT
from tests.support.waiting import HANG_SECS

BATCH = 16

pytestmark = pytest.mark.slow


class ServiceProcess:
    """The service in a process, and requests to it."""

    def __init__(self, *command: str) -> None:
        arguments = [sys.executable, "-W", "error", *command]
        self._process = processes.start(arguments, env={**os.environ, "PYTHONPATH": str(ROOT)})
        self.url = self.read_line()
        self._port = int(self.url.split(":")[2].split("/")[0])

    def read_line(self) -> str:
        """Return the next line of its output."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline().rstrip("\n")
        assert line or self._process.poll() is None, self._process.communicate()
        return line

    def begin(
        self, path: str, *, method: str = "GET", body: Any = None
    ) -> http.client.HTTPConnection:
        """Send a request, without waiting for the reply."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=HANG_SECS)
        connection.request(method, path, None if body is None else json.dumps(body))
        return connection

    def ask(self, path: str, **options: Any) -> tuple[int, Any]:
        """Send a request and return the status and the JSON of the reply."""
        return read_reply(self.begin(path, **options))

    def send_rows(self, steps: int) -> None:
        """Send the rows for a number of steps."""
        chance = random.Random(steps)
        rows = [[x, 2 * x * x - 1] for x in (chance.uniform(-1, 1) for _ in range(BATCH * steps))]
        assert self.ask("/rows", method="POST", body=rows)[0] == 202

    def wait_parked(self, count: int) -> None:
        """Request the progress until `count` clients wait for a step; while the session opens there
        is no store yet.
        """
        while (store := self.ask("/training/progress")[1]["store"]) is None or store[
            "waiting"
        ] < count:
            pass

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def end(self) -> tuple[int, str]:
        """Wait for its end and return status and output; the error stream may have log lines
        only.
        """
        out, err = self._process.communicate(timeout=HANG_SECS)
        assert "never retrieved" not in err, err
        assert "Exception ignored" not in err, err
        return self._process.returncode, out

    def kill(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.communicate()


def read_reply(connection: http.client.HTTPConnection) -> tuple[int, Any]:
    with contextlib.closing(connection):
        response = connection.getresponse()
        return response.status, json.loads(response.read())


@contextlib.contextmanager
def started(*command: str) -> Iterator[ServiceProcess]:
    process = ServiceProcess(*command)
    try:
        yield process
    finally:
        process.kill()


def example(directory: Path, *options: str) -> contextlib.AbstractContextManager[ServiceProcess]:
    return started(
        "examples/service.py", "--port", "0", "--checkpoint-dir", str(directory), *options
    )


MARKUP = "<img src=x onerror='window.hacked = 1'><script>window.hacked = 1</script>"
WITH_A_HOOK = """
import socket, sys
import aiohooks as ah
from examples.service import Service, serve

class Hook(ah.SessionRunHook):
    name = sys.argv[2]

hook = ah.configure(Hook(), name=Hook.name)
with socket.create_server(("127.0.0.1", 0)) as listener:
    print(f"http://127.0.0.1:{listener.getsockname()[1]}/training/", flush=True)
    sys.exit(ah.run(serve, Service(sys.argv[1], hooks=[hook]), listener))
"""


def with_a_hook(directory: Path, name: str) -> contextlib.AbstractContextManager[ServiceProcess]:
    """Start the service with a hook of this name."""
    return started("-c", WITH_A_HOOK, str(directory), name)


@pytest.mark.sample
def test_it_trains_and_serves(tmp_path: Path) -> None:
    """Rows make steps, waits for steps are answered, and predictions are served; a restart
    continues at the same step.
    """
    with example(tmp_path) as service:
        assert service.ask("/predict?x=0.5")[0] in (
            200,
            503,
        ), "while the session opens there may be no model yet"
        waiting = [service.begin("/training/steps/300") for _ in range(20)]
        service.wait_parked(20)
        service.send_rows(300)
        assert [read_reply(connection) for connection in waiting] == [
            (200, {"step": 300, "wanted": 300, "epoch": 1})
        ] * 20
        status, prediction = service.ask("/predict?x=0.5")
        assert status == 200
        assert abs(prediction["y"] - (2 * 0.5 * 0.5 - 1)) < 0.2
        progress = service.ask("/training/progress")[1]
        assert {"CheckpointSaverHook", "NanHook"} <= {hook["name"] for hook in progress["hooks"]}
        assert service.ask("/rows", method="POST", body=[["a", 1]])[0] == 400
        assert service.ask("/predict?x=nan")[0] == 400
        service.signal(signal.SIGTERM)
        assert service.end() == (0, "finished at step 300: the server received SIGTERM\n")
    assert saved_step(tmp_path) == 300
    with example(tmp_path) as service:
        assert service.ask("/training/steps/300")[1]["step"] == 300
        service.send_rows(1)
        assert service.ask("/training/steps/301")[1]["step"] == 301
        service.signal(signal.SIGINT)
        assert service.end() == (0, "finished at step 301: the server received SIGINT\n")
    assert saved_step(tmp_path) == 301


def test_the_page_shows_the_run_live(tmp_path: Path) -> None:
    """In a browser the page counts the steps, and shows that the service has gone; all its files
    come from the service.
    """
    with example(tmp_path) as service, Chromium() as chromium:
        chromium.open(service.url)
        chromium.wait_until("document.documentElement.dataset.state === 'running'")
        assert (
            chromium.evaluate("getComputedStyle(document.querySelector('#controls')).display")
            == "none"
        )
        service.send_rows(50)
        chromium.wait_until("document.querySelector('#figures dd')?.textContent === '50'")
        assert "NanHook" in chromium.evaluate("document.querySelector('#hooks').textContent")
        for width in (1100, 390):
            chromium.open(service.url, width=width, dark=width == 390)
            chromium.wait_until("document.querySelector('#figures dd')?.textContent === '50'")
            assert chromium.evaluate("document.documentElement.scrollWidth") == width, (
                "nothing is wider than the page"
            )
        names = chromium.evaluate("performance.getEntriesByType('resource').map((one) => one.name)")
        assert names
        assert all(name.startswith(service.url) for name in names)
        service.signal(signal.SIGTERM)
        chromium.wait_until("document.documentElement.dataset.state === 'disconnected'")
        assert service.end()[0] == 0


def test_the_buttons_control_the_session(tmp_path: Path) -> None:
    """With controls the page has buttons, which the keyboard reaches: drain and stop, when
    confirmed.
    """
    with example(tmp_path, "--controls") as service, Chromium() as chromium:
        chromium.open(service.url, width=390)
        chromium.wait_until("document.documentElement.dataset.state === 'running'")
        assert chromium.evaluate("document.documentElement.scrollWidth") == 390
        chromium.press("Tab")
        for answer in ("false", "true"):
            chromium.evaluate(f"window.confirm = () => {answer}")
            chromium.press("Enter", "\r")
            if answer == "false":
                assert service.ask("/training/health")[1]["state"] == "running"
        disabled = "[...document.querySelectorAll('button')].map((one) => one.disabled).join()"
        chromium.wait_until(
            f"document.documentElement.dataset.state === 'draining' && {disabled} === 'true,false'"
        )
        service.signal(signal.SIGTERM)
        chromium.wait_until(f"{disabled} === 'true,true'")
        assert service.end()[0] == 0


def test_names_that_are_markup_stay_text(tmp_path: Path) -> None:
    """A hook name that is a script is shown as text, and does not run."""
    with with_a_hook(tmp_path, MARKUP) as service, Chromium() as chromium:
        chromium.open(service.url)
        chromium.wait_until("document.documentElement.dataset.state === 'running'")
        service.send_rows(5)
        chromium.wait_until("document.querySelector('#hooks').textContent.includes('<img')")
        assert (
            chromium.evaluate(
                "document.querySelectorAll('img').length +"
                " document.querySelectorAll('script').length"
            )
            == 1
        )
        assert chromium.evaluate("typeof window.hacked") == "undefined"
        chromium.evaluate(
            "document.body.append(Object.assign(document.createElement('script'), {text:"
            " 'window.hacked = 2'}))"
        )
        assert chromium.evaluate("typeof window.hacked") == "undefined", (
            "the policy forbids scripts that are not in page.js"
        )
