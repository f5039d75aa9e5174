"""Joining a Ray cluster, with a stand-in for Ray; a real cluster is in
tests/integration/test_ray.py.
"""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Iterator

import pytest

from aiohooks.errors import StoreUnavailableError
from aiohooks.stores.ray import _cluster
from tests.support.waiting import HANG_SECS


class SlowRay:
    """A Ray whose `init` takes until `let_in` is set."""

    def __init__(self) -> None:
        self.let_in = threading.Event()
        self.left = threading.Event()
        self.joined = 0

    def is_initialized(self) -> bool:
        return self.joined > 0

    def init(self, **options: object) -> None:
        assert self.let_in.wait(HANG_SECS)
        self.joined += 1

    def shutdown(self) -> None:
        self.joined -= 1
        self.left.set()


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowRay]:
    """Replace Ray, and let its `init` end at last."""
    slow = SlowRay()
    monkeypatch.setattr(_cluster, "_ray", slow)
    monkeypatch.setattr(_cluster._Membership, "users", 0)
    monkeypatch.setattr(_cluster._Membership, "thread", None)
    yield slow
    slow.let_in.set()
    if (thread := _cluster._Membership.thread) is not None:
        thread.join(HANG_SECS)


def test_a_cluster_that_does_not_answer_is_given_up_in_time(ray: SlowRay) -> None:
    """Also without an address the timeout bounds it; what joins later leaves immediately, and the
    next one is let in.
    """
    for _ in range(2):
        with pytest.raises(
            StoreUnavailableError,
            match=r"at auto has not let this process in for 0\.01 s\. Start one",
        ):
            _cluster.join(None, timeout=0.01)
    ray.let_in.set()
    assert ray.left.wait(HANG_SECS)
    assert not ray.joined
    _cluster.join(None, timeout=HANG_SECS)
    assert ray.joined == 1
    _cluster.leave()
    assert not ray.joined


def test_a_process_leaves_when_its_calls_are_answered(
    ray: SlowRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray ends a process in which an answer arrives while it leaves."""
    ray.let_in.set()
    _cluster.join(None, timeout=HANG_SECS)
    last: concurrent.futures.Future[None] = concurrent.futures.Future()
    answered: list[bool] = []
    monkeypatch.setattr(_cluster._Membership, "calls", {last})
    monkeypatch.setattr(ray, "shutdown", lambda: answered.append(last.done()))
    answering = threading.Thread(
        target=lambda: (_cluster._Membership.end.wait(HANG_SECS), last.set_result(None))
    )
    answering.start()
    _cluster.leave()
    answering.join(HANG_SECS)
    assert answered == [True]
