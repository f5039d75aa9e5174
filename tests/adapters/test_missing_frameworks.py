"""The adapters for frameworks where these are not installed; their own tests are run by .ci/frameworks."""

from __future__ import annotations

import importlib

import pytest

from tests.support.extras import hide


@pytest.mark.parametrize("name", ["tensorflow", "keras", "lightning", "ignite", "transformers"])
def test_the_extra_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing one says what to install."""
    hide(monkeypatch, name, f"aiohooks.adapters.{name}")
    with pytest.raises(ImportError, match=rf"pip install 'aiohooks\[{name}\]'"):
        importlib.import_module(f"aiohooks.adapters.{name}")
