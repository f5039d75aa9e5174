"""What a machine looks like on which an extra is not installed."""

from __future__ import annotations

import builtins
import importlib
import sys
from typing import Any

import pytest


def hide(monkeypatch: pytest.MonkeyPatch, package: str, *modules: str) -> None:
    """Make `package` look not installed to those modules of the library, which are imported
    anew.
    """
    for module in modules:
        parent, _, name = module.rpartition(".")
        monkeypatch.delitem(sys.modules, module, raising=False)
        monkeypatch.delattr(importlib.import_module(parent), name, raising=False)
    real = builtins.__import__

    def guarded(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.split(".")[0] == package:
            raise ImportError(f"No module named {name!r}")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", guarded)
