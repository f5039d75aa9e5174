"""Packages that import a public name when it is first used: the module-level `__getattr__` of PEP
562.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Collection, Mapping
from typing import Any


def lazy_names(
    package: str, defined_in: Mapping[str, Collection[str]], packages: Collection[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` of a package whose names are in these modules, and which
    has these packages.

    A name that is there twice is in the later module.
    Type checkers read the imports that the package has under `TYPE_CHECKING`; they must not see
    this `__getattr__`, with which any name would exist.
    """
    module_of = {name: module for module, names in defined_in.items() for name in names}

    def import_name(name: str) -> Any:
        if name in packages:
            return importlib.import_module(f"{package}.{name}")
        if name not in module_of:
            import difflib  # only for a message

            near = (
                []
                if name.startswith("_")
                else difflib.get_close_matches(name, (*module_of, *packages), n=1)
            )
            hint = f"; did you mean {near[0]!r}?" if near else ""
            # With its name, but no object, Python does not add a hint of its own.
            raise AttributeError(f"module {package!r} has no attribute {name!r}{hint}", name=name)
        public = getattr(importlib.import_module(module_of[name]), name)
        if public.__module__.startswith(package):  # or it has the name of a shorter path already
            public.__module__ = package  # so that tracebacks and docs name `aiohooks.Graph`
        setattr(sys.modules[package], name, public)
        return public

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *module_of, *packages})

    return import_name, names
