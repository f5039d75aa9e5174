"""Settings of the frameworks, and one loop of each."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.setdefault("KERAS_BACKEND", "torch")  # as for the others; TensorFlow takes seconds to import
os.environ.setdefault("HF_HUB_OFFLINE", "1")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from tests.adapters.callbacks.loops import LOOPS, Loop

FOLDER = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let the frameworks warn: of each other's old names, of machines with few cores, of loggers that are off."""
    for item in items:
        if FOLDER in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("ignore"))


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the frameworks write where nothing else is."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    """Check that the threads of sessions have ended."""
    yield
    assert [thread.name for thread in threading.enumerate() if "portal" in thread.name] == []


@pytest.fixture(params=LOOPS, ids=lambda loop: loop.__name__)
def loop(request: pytest.FixtureRequest) -> Loop:
    """Each of the frameworks' loops in turn."""
    found: Loop = request.param
    return found
