"""The example of a web service: a process that is asked over HTTP, watched in a browser, and ended by signals."""

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
from tests.support.chromium import BROWSER, Chromium

ROOT = Path(__file__).parents[2]
# A guard against hanging for ever, not a measurement.
PATIENCE_SECS = 60
BATCH = 16

pytestmark = pytest.mark.slow
browser = pytest.mark.skipif(BROWSER is None, reason="there is no chromium here; its package is called chromium")


class Process:
    """The service as a process, and requests of it."""

    def __init__(self, *command: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-W", "error", *command],
            cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        self.url = self.line()
        self._port = int(self.url.split(":")[2].split("/")[0])

    def line(self) -> str:
        """The next line that it writes."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline().rstrip("\n")
        assert line or self._process.poll() is None, self._process.communicate()
        return line

    def begin(self, path: str, *, method: str = "GET", body: Any = None) -> http.client.HTTPConnection:
        """Sends a request; its answer is for later."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=PATIENCE_SECS)
        connection.request(method, path, None if body is None else json.dumps(body))
        return connection

    def ask(self, path: str, **options: Any) -> tuple[int, Any]:
        """Status and JSON of the answer."""
        return answer(self.begin(path, **options))

    def learn(self, steps: int) -> None:
        """Sends the rows for so many steps more."""
        chance = random.Random(steps)
        rows = [[x, 2 * x * x - 1] for x in (chance.uniform(-1, 1) for _ in range(BATCH * steps))]
        assert self.ask("/rows", method="POST", body=rows)[0] == 202

    def wait_parked(self, count: int) -> None:
        """Asks until so many wait for a step; while the session opens there is no store yet."""
        while (store := self.ask("/training/progress")[1]["store"]) is None or store["waiting"] < count:
            pass

    def release(self) -> None:
        """Lets go what holds on."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write("x")
            self._process.stdin.flush()

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def end(self) -> tuple[int, str]:
        """Waits for its end: the status, and what it wrote; nothing may be on the error stream but what it logs."""
        self._process.wait(PATIENCE_SECS)  # before `communicate`, which lets go what holds on
        out, err = self._process.communicate()
        assert "never retrieved" not in err, err
        assert "Exception ignored" not in err, err
        return self._process.returncode, out

    def kill(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.communicate()


def answer(connection: http.client.HTTPConnection) -> tuple[int, Any]:
    with contextlib.closing(connection):
        response = connection.getresponse()
        return response.status, json.loads(response.read())


def events(connection: http.client.HTTPConnection) -> list[tuple[str, Any]]:
    """The rest of a stream of events, to its end."""
    with contextlib.closing(connection):
        text = connection.getresponse().read().decode()
    return [(one.split("\n")[0][7:], json.loads(one.split("\n")[1][6:])) for one in text.split("\n\n") if one]


@contextlib.contextmanager
def started(*command: str) -> Iterator[Process]:
    process = Process(*command)
    try:
        yield process
    finally:
        process.kill()


def example(directory: Path) -> contextlib.AbstractContextManager[Process]:
    return started("examples/service.py", "--port", "0", "--checkpoint-dir", str(directory))


def held(directory: Path, what: str, step: int, grace_secs: float = 4.0) -> contextlib.AbstractContextManager[Process]:
    return started("-m", "tests.support.paused_service", str(directory), what, str(step), str(grace_secs))


def saved(directory: Path) -> int | None:
    """The step of the newest good checkpoint."""
    found = asyncio.run(Saver(directory, read_only=True).restore())
    return None if found is None else found.checkpoint.step


def test_it_learns_and_serves(tmp_path: Path) -> None:
    """Rows make steps, steps are told to those who wait for them, and what was learned is served; a restart goes on."""
    with example(tmp_path) as service:
        assert service.ask("/predict?x=0.5")[0] in (200, 503), "while the session opens there may be no model yet"
        waiting = [service.begin("/training/steps/300") for _ in range(20)]
        service.wait_parked(20)
        service.learn(300)
        assert [answer(one) for one in waiting] == [(200, {"step": 300, "wanted": 300, "epoch": 1})] * 20
        status, told = service.ask("/predict?x=0.5")
        assert status == 200
        assert abs(told["y"] - (2 * 0.5 * 0.5 - 1)) < 0.2
        told = service.ask("/training/progress")[1]
        assert told["values"]["loss"]["values"][-1] < told["values"]["loss"]["values"][0] / 5
        assert {"HistoryHook", "NanHook"} <= {one["hook"] for one in told["hooks"]}
        assert service.ask("/rows", method="POST", body=[["a", 1]])[0] == 400
        assert service.ask("/predict?x=nan")[0] == 400
        service.signal(signal.SIGTERM)
        assert service.end() == (0, "finished at step 300: the server received SIGTERM\n")
    assert saved(tmp_path) == 300
    with example(tmp_path) as service:
        assert service.ask("/training/steps/300")[1]["step"] == 300
        service.learn(1)
        assert service.ask("/training/steps/301")[1]["step"] == 301
        service.signal(signal.SIGINT)
        assert service.end() == (0, "finished at step 301: the server received SIGINT\n")
    assert saved(tmp_path) == 301


def test_sigterm_in_the_middle_of_a_step_wait(tmp_path: Path) -> None:
    """The session's own wait ends, clients that wait are answered, streams end; then the process does, with a checkpoint."""
    with example(tmp_path) as service:
        service.learn(2)
        service.ask("/training/steps/2")
        status, health = service.ask("/training/health")
        assert status == 200
        assert any("waiting for step 48 of rows that have come" in one for one in health["doing"])
        waiting = [service.begin("/training/steps/9") for _ in range(5)]
        follower = service.begin("/training/events")
        service.wait_parked(5)
        service.signal(signal.SIGTERM)
        message = "the session makes no more steps: the server received SIGTERM"
        expected = {"error": "stopped", "message": message, "wanted": 9, "step": 2}
        assert [answer(one) for one in waiting] == [(410, expected)] * 5
        kind, told = events(follower)[-1]
        assert (kind, told["state"], told["stop_reason"]) == ("end", "finished", "the server received SIGTERM")
        assert service.end() == (0, "finished at step 2: the server received SIGTERM\n")
    assert saved(tmp_path) == 2


@pytest.mark.parametrize("what", ["hook", "save"])
def test_sigterm_in_the_middle_of_a_hook_and_of_a_save(tmp_path: Path, what: str) -> None:
    """Clients are answered at once; the hook, or the save, is waited for; then there is a last checkpoint."""
    with held(tmp_path, what, 3) as service:
        service.learn(4 if what == "save" else 3)
        assert service.line() == "held"
        assert service.ask("/training/steps/3")[0] == 200
        waiting = service.begin("/training/steps/9")
        service.wait_parked(1)
        if what == "hook":
            assert any(
                "Held.after_run" in one or "after_run at step 3" in one for one in service.ask("/training/health")[1]["doing"]
            )
        service.signal(signal.SIGTERM)
        assert answer(waiting)[0] == 410, "while it is still held"
        service.release()
        status, out = service.end()
        step = 3 if what == "hook" else int(out.split("at step ")[1].split(":")[0])
        assert (status, out) == (0, f"finished at step {step}: the server received SIGTERM\n")
        assert step in (3, 4)
    assert saved(tmp_path) == step


def test_sigterm_in_a_hook_that_never_returns(tmp_path: Path) -> None:
    """The process waits for its grace period, then ends without it: with status 1, and the checkpoint before."""
    with held(tmp_path, "hook", 3, grace_secs=0.5) as service:
        service.learn(3)
        assert service.line() == "held"
        service.signal(signal.SIGTERM)
        assert service.end() == (1, "failed at step 3: CancelledError: the grace period was over\n")
    assert saved(tmp_path) == 0


def test_a_crash_turns_health_red_and_the_rest_goes_on(tmp_path: Path) -> None:
    """Health says why with 503, waits are answered, predictions are served on; no password and no traceback is told."""
    with held(tmp_path, "crash", 3) as service:
        service.learn(2)
        service.ask("/training/steps/2")
        assert service.ask("/training/health")[0] == service.ask("/training/ready")[0] == 200
        waiting = service.begin("/training/steps/9")
        follower = service.begin("/training/events")
        service.wait_parked(1)
        service.learn(1)
        failure = "OSError: cannot reach postgres://***@db/rows"
        status, told = answer(waiting)
        assert (status, told["message"]) == (503, f"the session failed: {failure}")
        kind, told = events(follower)[-1]
        assert (kind, told["state"], told["failure"]) == ("end", "failed", failure)
        status, health = service.ask("/training/health")
        assert (status, health["state"], health["failure"]) == (503, "failed", failure)
        assert service.ask("/training/ready")[0] == 503
        assert service.ask("/training/steps/9")[0] == 503
        assert service.ask("/predict?x=0.5")[0] == 200
        service.signal(signal.SIGTERM)
        assert service.end() == (1, f"failed at step 3: {failure}\n")


@browser
def test_the_page_shows_the_run_live(tmp_path: Path) -> None:
    """In a browser the page draws the values, counts the steps, and tells the stop; it asks for nothing from elsewhere."""
    with example(tmp_path) as service, Chromium() as chromium:
        chromium.open(service.url)
        chromium.wait_until("document.documentElement.dataset.state === 'running'")
        service.learn(50)
        chromium.wait_until("document.querySelector('#figures dd').textContent === '50'")
        assert chromium.evaluate("document.querySelector('#charts figcaption span').textContent") == "loss"
        assert chromium.evaluate("document.querySelector('#charts path').getAttribute('d').split('L').length") == 50
        assert "HistoryHook" in chromium.evaluate("document.querySelector('#hooks').textContent")
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


@browser
def test_names_that_are_markup_stay_text(tmp_path: Path) -> None:
    """A title and a hook whose names are scripts are shown as they are written, and nothing of them runs."""
    with held(tmp_path, "names", 3) as service, Chromium() as chromium:
        chromium.open(service.url)
        chromium.wait_until("document.documentElement.dataset.state === 'running'")
        service.learn(5)
        chromium.wait_until("document.querySelector('#hooks').textContent.includes('<img')")
        assert chromium.evaluate("document.querySelector('h1').textContent").startswith("<img src=x onerror=")
        assert chromium.evaluate("document.querySelectorAll('img').length + document.querySelectorAll('script').length") == 1
        assert chromium.evaluate("typeof window.hacked") == "undefined"
        chromium.evaluate("document.body.append(Object.assign(document.createElement('script'), {text: 'window.hacked = 2'}))")
        assert chromium.evaluate("typeof window.hacked") == "undefined", "the policy forbids scripts that are not in page.js"
