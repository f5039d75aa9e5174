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
    elsewhere: Collection[str] = (),
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the `__getattr__` and the `__dir__` of a package.

    Type checkers read the imports that the package has under `TYPE_CHECKING`. They must not see
    this `__getattr__`, with which any name would exist. A missing name is reported with the module
    that has it, and never with another class.

    Args:
        package: the name of the package.
        defined_in: the public names, by the module that defines them; of several, the last one.
        packages: the names of its public packages.
        elsewhere: modules whose public names an error points to.
    """
    module_of = {name: module for module, names in defined_in.items() for name in names}

    def import_name(name: str) -> Any:
        if name in packages:
            return importlib.import_module(f"{package}.{name}")
        if name not in module_of:
            pointer = pointer_to(name, package, elsewhere)
            # For `from aiohooks import x`, importlib calls this function first. It would replace an
            # AttributeError by an ImportError without the pointer.
            caller = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
            if pointer and caller.f_code.co_name == "_handle_fromlist":
                raise ImportError(f"cannot import name {name!r} from {package!r}{pointer}")
            # With `name` but without `obj`, Python adds no similar name, which could be another
            # class.
            message = f"module {package!r} has no attribute {name!r}{pointer}"
            raise AttributeError(message, name=name)
        public = getattr(importlib.import_module(module_of[name]), name)
        # Tracebacks and docs have the public path, `aiohooks.Graph`. It may be a shorter one.
        if public.__module__.startswith(package):
            public.__module__ = package
        setattr(sys.modules[package], name, public)
        return public

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *module_of, *packages})

    return import_name, names


def pointer_to(name: str, package: str, elsewhere: Collection[str]) -> str:
    """Return the end of a message about a missing name: its module, or the name that is meant.

    Modules whose extra is missing are skipped.
    """
    if name.startswith("_"):
        return ""  # what tools ask each module for
    # Only a message needs these modules, whose import takes a while.
    import difflib
    from importlib.util import find_spec

    if find_spec(f"{package}.{name}") is not None:
        return ""  # a module, which `from package import module` imports next
    paths: dict[str, str] = {}
    for module_name in (package, *elsewhere):
        try:
            public_names = importlib.import_module(module_name).__all__
        except ImportError:
            continue
        for public_name in public_names:
            paths.setdefault(public_name, f"{module_name}.{public_name}")
    if name in paths:
        return f"; it is {paths[name]}"
    # With a lower cutoff, `RedisStepStore` would lead to `SharedStepStore`.
    similar_names = difflib.get_close_matches(name, paths, n=1, cutoff=0.8)
    return f"; did you mean {paths[similar_names[0]]}?" if similar_names else ""
