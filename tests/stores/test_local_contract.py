"""The laws of a step store, on the one in files; and the same where files cannot be watched."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from aiohooks.stores.local import LocalStepStore
from aiohooks.stores.local._notify import Inotify
from aiohooks.testing import check_step_store, step_store_checks

pytestmark = pytest.mark.every_python


class WithoutInotify(LocalStepStore):
    """As where inotify is missing, or used up."""

    def _make_inotify(self) -> Inotify:
        raise OSError(errno.EMFILE, "Too many open files")


@pytest.mark.parametrize("law", step_store_checks())
@pytest.mark.parametrize("kind", [LocalStepStore, WithoutInotify])
async def test_laws(tmp_path: Path, kind: type[LocalStepStore], law: str) -> None:
    """What holds for every step store holds for this one, watching files or told by named pipes."""
    await check_step_store(lambda run: kind(tmp_path, run=run), law)
    places = [tmp_path / run / place for run in os.listdir(tmp_path) for place in ("alive", "bells")]
    assert [name for place in places for name in os.listdir(place)] == []
