"""What a machine looks like on which an extra is not installed."""

from __future__ import annotations

import builtins
import importlib
import sys
from typing import Any

import pytest


def hide(monkeypatch: pytest.MonkeyPatch, package: str, module: str) -> None:
    """Makes `package` as if it were not installed, for the library's `module` that imports it."""
    parent, _, name = module.rpartition(".")
    monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.delattr(importlib.import_module(parent), name, raising=False)
    real = builtins.__import__

    def guarded(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.split(".")[0] == package:
            raise ImportError(f"No module named {name!r}")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", guarded)
