"""The launcher's membership of a Ray cluster, with a stand-in for Ray; a real cluster is in
tests/integration/test_ray_processes.py.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

# Before Ray, which reads its environment when it is imported.
from tests.support.ray_cluster import environment as environment

# isort: split
from aiohooks.distributed import ray as launcher
from aiohooks.errors import StoreUnavailableError
from tests.support.waiting import HANG_SECS


class SlowRay:
    """A Ray whose `init` takes until `let_in` is set."""

    _private = SimpleNamespace(ray_constants=SimpleNamespace(ENABLE_RAY_CLUSTER=True))

    def __init__(self) -> None:
        self.let_in = threading.Event()
        self.left = threading.Event()
        self.joined = False

    def is_initialized(self) -> bool:
        return self.joined

    def get_runtime_context(self) -> SimpleNamespace:
        return SimpleNamespace(gcs_address="head:6379")

    def init(self, **options: object) -> None:
        assert self.let_in.wait(HANG_SECS)
        self.joined = True

    def shutdown(self) -> None:
        self.joined = False
        self.left.set()


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowRay]:
    """Replace Ray, and let its `init` end at last."""
    slow = SlowRay()
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(launcher, "_ray", slow)
    yield slow
    slow.let_in.set()
    assert slow.left.wait(HANG_SECS)


async def test_a_cluster_that_does_not_answer_is_given_up_in_time(
    ray: SlowRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also without an address the time is bounded; a process that joins later leaves
    immediately.
    """
    monkeypatch.setattr(launcher, "_JOIN_SECS", 0.01)
    with pytest.raises(
        StoreUnavailableError, match=r"cluster at auto does not let this process in\. Start one"
    ):
        async with launcher.cluster_membership(None):
            pass
    ray.let_in.set()
    assert ray.left.wait(HANG_SECS)
    assert not ray.joined


async def test_a_process_is_a_member_for_the_block(ray: SlowRay) -> None:
    """It leaves the cluster at the end, unless it was a member before."""
    ray.let_in.set()
    async with launcher.cluster_membership(None):
        async with launcher.cluster_membership(None):
            assert ray.joined
        assert ray.joined
    assert not ray.joined
