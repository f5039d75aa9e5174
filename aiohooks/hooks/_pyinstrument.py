"""Profiles by pyinstrument: the one module that imports it."""

from __future__ import annotations

from aiohooks.errors import missing_extra

try:
    from pyinstrument import Profiler
    from pyinstrument.renderers import HTMLRenderer
except ImportError as error:
    raise missing_extra('ProfilerHook(backend="pyinstrument")', "pyinstrument") from error


class SampledProfile(Profiler):
    """Samples the stack of the event loop's thread: everything that runs in it, not only the hook's task."""

    suffix = ".html"

    def __init__(self) -> None:
        super().__init__(async_mode="disabled")

    def write(self, path: str) -> None:
        with open(path, "w", encoding="utf-8") as file:
            file.write(self.output(HTMLRenderer()))
