"""Packages that import a public name when it is first used: a module's `__getattr__` (PEP 562)."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Collection, Mapping
from typing import Any


def lazy_names(
    package: str,
    defined_in: Mapping[str, Collection[str]],
    packages: Collection[str] = (),
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the `__getattr__` and the `__dir__` of a package.

    Type checkers read the imports that the package has under `TYPE_CHECKING`. They must not see
    this `__getattr__`, with which any name would exist.

    Args:
        package: the name of the package.
        defined_in: the public names, by the module that defines them; of several, the last one.
        packages: the names of its public packages.
    """
    module_of = {name: module for module, names in defined_in.items() for name in names}

    def import_name(name: str) -> Any:
        if name in packages:
            return importlib.import_module(f"{package}.{name}")
        if name not in module_of:
            # With `name` but without `obj`, Python adds no similar name, which could be another
            # class.
            raise AttributeError(f"module {package!r} has no attribute {name!r}", name=name)
        public = getattr(importlib.import_module(module_of[name]), name)
        # Tracebacks and docs have the public path, `aiohooks.Graph`. It may be a shorter one.
        if public.__module__.startswith(package):
            public.__module__ = package
        setattr(sys.modules[package], name, public)
        return public

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *module_of, *packages})

    return import_name, names
