"""Stand-ins for packages that are not installed: the pages of the adapters for them need their
names, and nothing else.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Iterator, Sequence

FRAMEWORKS = ("tensorflow",)


class _StandIn(type):
    """A class that has every attribute: another such class."""

    def __getattr__(cls, name: str) -> _StandIn:
        return _stand_in(name)


def _stand_in(name: str) -> _StandIn:
    if name.startswith("_"):
        raise AttributeError(name)
    return _StandIn(name, (), {})


class _Finder:
    """Finds the missing ones of `FRAMEWORKS`, and all their modules."""

    def __init__(self) -> None:
        self.missing: list[str] = [
            name for name in FRAMEWORKS if importlib.util.find_spec(name) is None
        ]

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] not in self.missing:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        return None

    def exec_module(self, module: types.ModuleType) -> None:
        module.__getattr__ = _stand_in  # type: ignore[method-assign]


@contextlib.contextmanager
def stand_ins() -> Iterator[None]:
    """Have stand-ins during the block; what was imported in it is forgotten, unless the block is in
    another one.
    """
    if any(isinstance(one, _Finder) for one in sys.meta_path):
        yield
        return
    finder, before = _Finder(), {*sys.modules}
    sys.meta_path.append(finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in {*sys.modules} - before:
            if name.startswith("aiohooks.adapters.") or name.partition(".")[0] in finder.missing:
                del sys.modules[name]
