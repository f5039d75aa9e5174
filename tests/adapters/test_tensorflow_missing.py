"""The adapter for TensorFlow where that is not installed; its own tests are in tests/adapters/tensorflow."""

from __future__ import annotations

import importlib

import pytest

from tests.support.extras import hide


def test_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing it says what to install."""
    hide(monkeypatch, "tensorflow", "aiohooks.adapters.tensorflow")
    with pytest.raises(ImportError, match=r"pip install 'aiohooks\[tensorflow\]'"):
        importlib.import_module("aiohooks.adapters.tensorflow")
