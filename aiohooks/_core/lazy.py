"""Packages that import a public name when it is first used: a module's `__getattr__` (PEP 562).

lazy_names    the `__getattr__` and the `__dir__` of such a package
pointer_to    the end of the message about a missing name: where it is, or a similar name
"""

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
    this `__getattr__`, because with it, any name would look valid. The message about a missing name
    points to the module that has the name, or to a very similar name.

    Args:
        package: the name of the package.
        defined_in: the public names of each module. If several modules have a name, the last one
            defines it.
        packages: the names of its public packages.
        elsewhere: other modules in which the message about a missing name looks for it.
    """
    module_of = {name: module for module, names in defined_in.items() for name in names}

    def import_name(name: str) -> Any:
        """Return an attribute that the package does not have yet: its `__getattr__`."""
        if name in packages:
            return importlib.import_module(f"{package}.{name}")
        if name not in module_of:
            pointer = pointer_to(name, package, elsewhere)
            # For `from aiohooks import x`, importlib calls this function first
            # (`_handle_fromlist`), and ignores an AttributeError. The import statement would then
            # raise an ImportError without the pointer.
            caller = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
            if pointer and caller.f_code.co_name == "_handle_fromlist":
                raise ImportError(f"cannot import name {name!r} from {package!r}{pointer}")
            # If the error had the argument `obj`, too, Python would suggest a similar name, which
            # could be a quite different class.
            message = f"module {package!r} has no attribute {name!r}{pointer}"
            raise AttributeError(message, name=name)
        public = getattr(importlib.import_module(module_of[name]), name)
        # Tracebacks and docs show the public path, such as `aiohooks.Graph`. A class that
        # `aiohooks` itself has exported before has `aiohooks` as its `__module__`, and keeps it.
        if public.__module__.startswith(package):
            public.__module__ = package
        # The next access finds the name in the package, and does not call this function.
        setattr(sys.modules[package], name, public)
        return public

    def names() -> list[str]:
        """Return the names of the package, also those that were not imported yet."""
        return sorted({*vars(sys.modules[package]), *module_of, *packages})

    return import_name, names


def pointer_to(
    name: str,
    package: str,
    elsewhere: Collection[str],
) -> str:
    """Return the end of a message about a missing name: its module, or the name that is meant.

    It is empty if there is neither. Modules whose extra is not installed are skipped.

    Args:
        name: the missing name.
        package: the package that was asked for it.
        elsewhere: other modules that may have the name.
    """
    # Tools ask each module for private names, such as `__wrapped__`.
    if name.startswith("_"):
        return ""
    # Imported here, as only a message needs these modules, and their import takes a while.
    import difflib
    from importlib.util import find_spec

    # The name is a module of the package, which `from package import module` imports next.
    if find_spec(f"{package}.{name}") is not None:
        return ""
    # The full path of each public name. If several modules have a name, the first one counts.
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
