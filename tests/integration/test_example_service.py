"""The example of a web service: a process that gets HTTP requests and signals, and whose page a browser shows."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from aiohooks.checkpoint import Saver
from tests.support import processes
from tests.support.chromium import Chromium
from tests.support.source import ROOT
from tests.support.waiting import HANG_SECS

BATCH = 16
NO_MORE = "the session makes no more steps: "

pytestmark = pytest.mark.slow


class ServiceProcess:
    """The service in a process, and requests to it."""

    def __init__(self, *command: str) -> None:
        arguments = [sys.executable, "-W", "error", *command]
        self._process = processes.start(arguments, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdin=subprocess.PIPE)
        self.url = self.read_line()
        self._port = int(self.url.split(":")[2].split("/")[0])

    def read_line(self) -> str:
        """Return the next line of its output."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline().rstrip("\n")
        assert line or self._process.poll() is None, self._process.communicate()
        return line

    def begin(self, path: str, *, method: str = "GET", body: Any = None) -> http.client.HTTPConnection:
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
        """Request the progress until `count` clients wait for a step; while the session opens there is no store yet."""
        while (store := self.ask("/training/progress")[1]["store"]) is None or store["waiting"] < count:
            pass

    def release(self) -> None:
        """Let the paused hook or save continue."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write("x")
            self._process.stdin.flush()

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def end(self) -> tuple[int, str]:
        """Wait for its end and return status and output; the error stream may have log lines only."""
        self._process.wait(HANG_SECS)  # before `communicate`, which would let a paused hook continue
        out, err = self._process.communicate()
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


def read_events(connection: http.client.HTTPConnection) -> list[tuple[str, Any]]:
    """Return the remaining events of a stream, up to its end."""
    with contextlib.closing(connection):
        text = connection.getresponse().read().decode()
    return [(one.split("\n")[0][7:], json.loads(one.split("\n")[1][6:])) for one in text.split("\n\n") if one]


@contextlib.contextmanager
def started(*command: str) -> Iterator[ServiceProcess]:
    process = ServiceProcess(*command)
    try:
        yield process
    finally:
        process.kill()


def example(directory: Path) -> contextlib.AbstractContextManager[ServiceProcess]:
    return started("examples/service.py", "--port", "0", "--checkpoint-dir", str(directory))


def paused(
    directory: Path, what: str, step: int, grace_secs: float = HANG_SECS
) -> contextlib.AbstractContextManager[ServiceProcess]:
    return started("-m", "tests.support.paused_service", str(directory), what, str(step), str(grace_secs))


def saved_step(directory: Path) -> int | None:
    """Return the step of the newest good checkpoint."""
    found = asyncio.run(Saver(directory, read_only=True).restore())
    return None if found is None else found.checkpoint.step


def test_it_trains_and_serves(tmp_path: Path) -> None:
    """Rows make steps, waits for steps are answered, and predictions are served; a restart continues at the same step."""
    with example(tmp_path) as service:
        assert service.ask("/predict?x=0.5")[0] in (200, 503), "while the session opens there may be no model yet"
        waiting = [service.begin("/training/steps/300") for _ in range(20)]
        service.wait_parked(20)
        service.send_rows(300)
        assert [read_reply(one) for one in waiting] == [(200, {"step": 300, "wanted": 300, "epoch": 1})] * 20
        status, prediction = service.ask("/predict?x=0.5")
        assert status == 200
        assert abs(prediction["y"] - (2 * 0.5 * 0.5 - 1)) < 0.2
        progress = service.ask("/training/progress")[1]
        losses = progress["values"]["loss"]["values"]
        assert losses[-1] < losses[0] / 5
        assert {"HistoryHook", "NanHook"} <= {one["hook"] for one in progress["hooks"]}
        assert service.ask("/rows", method="POST", body=[["a", 1]])[0] == 400
        assert service.ask("/predict?x=nan")[0] == 400
        # SIGTERM in the middle of a wait: clients are answered, streams end, then the process, with a checkpoint.
        assert any("waiting for step 4816 of rows received" in one for one in service.ask("/training/health")[1]["doing"])
        waiting, follower = [service.begin("/training/steps/309") for _ in range(5)], service.begin("/training/events")
        service.wait_parked(5)
        service.signal(signal.SIGTERM)
        expected = {"error": "stopped", "message": f"{NO_MORE}the server received SIGTERM", "wanted": 309, "step": 300}
        assert [read_reply(one) for one in waiting] == [(410, expected)] * 5
        kind, event = read_events(follower)[-1]
        assert (kind, event["state"], event["stop_reason"]) == ("end", "finished", "the server received SIGTERM")
        assert service.end() == (0, "finished at step 300: the server received SIGTERM\n")
    assert saved_step(tmp_path) == 300
    with example(tmp_path) as service:
        assert service.ask("/training/steps/300")[1]["step"] == 300
        service.send_rows(1)
        assert service.ask("/training/steps/301")[1]["step"] == 301
        service.signal(signal.SIGINT)
        assert service.end() == (0, "finished at step 301: the server received SIGINT\n")
    assert saved_step(tmp_path) == 301


@pytest.mark.parametrize("what", ["hook", "save"])
def test_sigterm_in_the_middle_of_a_hook_and_of_a_save(tmp_path: Path, what: str) -> None:
    """Clients are answered immediately; the session waits for the hook, or the save; then there is a last checkpoint."""
    with paused(tmp_path, what, 3) as service:
        service.send_rows(4 if what == "save" else 3)
        assert service.read_line() == "paused"
        assert service.ask("/training/steps/3")[0] == 200
        waiting = service.begin("/training/steps/9")
        service.wait_parked(1)
        if what == "hook":
            assert any("after_run at step 3" in one for one in service.ask("/training/health")[1]["doing"])
        service.signal(signal.SIGTERM)
        assert read_reply(waiting)[0] == 410, "while it is still paused"
        service.release()
        status, out = service.end()
        step = 3 if what == "hook" else int(out.split("at step ")[1].split(":")[0])
        assert (status, out) == (0, f"finished at step {step}: the server received SIGTERM\n")
        assert step in (3, 4)
    assert saved_step(tmp_path) == step


def test_sigterm_in_a_hook_that_never_returns(tmp_path: Path) -> None:
    """After the grace period the process ends without it, with status 1 and the previous checkpoint."""
    with paused(tmp_path, "hook", 3, grace_secs=0.5) as service:
        service.send_rows(3)
        assert service.read_line() == "paused"
        service.signal(signal.SIGTERM)
        assert service.end() == (1, "failed at step 3: CancelledError: the grace period was over\n")
    assert saved_step(tmp_path) == 0


def test_a_crash_turns_health_red_and_the_service_continues(tmp_path: Path) -> None:
    """Health is 503 with the reason, waits are answered, predictions are still served; no password and no traceback is shown."""
    with paused(tmp_path, "crash", 3) as service:
        service.send_rows(2)
        service.ask("/training/steps/2")
        waiting, follower = service.begin("/training/steps/9"), service.begin("/training/events")
        service.wait_parked(1)
        service.send_rows(1)
        failure = "OSError: cannot reach postgres://***@db/rows"
        status, reply = read_reply(waiting)
        assert (status, reply["message"]) == (503, f"the session failed: {failure}")
        kind, event = read_events(follower)[-1]
        status, health = service.ask("/training/health")
        for report in (event, health):
            assert (report["state"], report["failure"]) == ("failed", failure)
        assert (kind, status, service.ask("/training/ready")[0], service.ask("/predict?x=0.5")[0]) == ("end", 503, 503, 200)
        service.signal(signal.SIGTERM)
        assert service.end() == (1, f"failed at step 3: {failure}\n")


def test_the_page_shows_the_run_live(tmp_path: Path) -> None:
    """In a browser the page draws the values, counts the steps and shows the stop; all its files come from the service."""
    with example(tmp_path) as service, Chromium() as chromium:
        chromium.open(service.url)
        chromium.wait_until("document.documentElement.dataset.state === 'running'")
        service.send_rows(50)
        chromium.wait_until("document.querySelector('#figures dd').textContent === '50'")
        assert chromium.evaluate("document.querySelector('#charts figcaption span').textContent") == "loss"
        assert chromium.evaluate("document.querySelector('#charts path').getAttribute('d').split('L').length") == 50
        assert "HistoryHook" in chromium.evaluate("document.querySelector('#hooks').textContent")
        lanes = "[...document.querySelectorAll('#lanes li')].map((one) => one.textContent)"
        chromium.wait_until("document.querySelectorAll('#lanes rect').length > 16")
        assert any("train" in one for one in chromium.evaluate(lanes))
        assert "busy for" in chromium.evaluate("document.querySelector('#lanes svg[role=img] > title').textContent")
        for width in (1100, 390):
            chromium.open(service.url, width=width, dark=width == 390)
            chromium.wait_until("document.querySelectorAll('#lanes rect').length > 16")
            assert chromium.evaluate("document.documentElement.scrollWidth") == width, "nothing is wider than the page"
        names = chromium.evaluate("performance.getEntriesByType('resource').map((one) => one.name)")
        assert names
        assert all(name.startswith(service.url) for name in names)
        shot = tmp_path / "page.png"
        chromium.screenshot(shot)
        assert shot.read_bytes().startswith(b"\x89PNG")
        service.signal(signal.SIGTERM)
        chromium.wait_until("document.documentElement.dataset.state === 'finished'")
        assert chromium.evaluate("document.querySelector('#notice').textContent") == "stop: the server received SIGTERM"
        assert service.end()[0] == 0


def test_names_that_are_markup_stay_text(tmp_path: Path) -> None:
    """A title and a hook name that are scripts are shown as text, and do not run."""
    with paused(tmp_path, "names", 3) as service, Chromium() as chromium:
        chromium.open(service.url)
        chromium.wait_until("document.documentElement.dataset.state === 'running'")
        service.send_rows(5)
        chromium.wait_until("document.querySelector('#hooks').textContent.includes('<img')")
        assert chromium.evaluate("document.querySelector('h1').textContent").startswith("<img src=x onerror=")
        assert chromium.evaluate("document.querySelectorAll('img').length + document.querySelectorAll('script').length") == 1
        assert chromium.evaluate("typeof window.hacked") == "undefined"
        chromium.evaluate("document.body.append(Object.assign(document.createElement('script'), {text: 'window.hacked = 2'}))")
        assert chromium.evaluate("typeof window.hacked") == "undefined", "the policy forbids scripts that are not in page.js"
