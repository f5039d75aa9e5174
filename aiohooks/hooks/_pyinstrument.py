"""Profiles by pyinstrument: the one module that imports it."""

from __future__ import annotations

from aiohooks.hooks._extras import missing_extra

try:
    from pyinstrument import Profiler
    from pyinstrument.renderers import HTMLRenderer
except ImportError as error:
    raise missing_extra('ProfilerHook(backend="pyinstrument")', "pyinstrument") from error


class SampledProfile:
    """Samples the stack of the event loop's thread: whatever runs in it, not this hook's task alone."""

    suffix = ".html"

    def __init__(self) -> None:
        """Starts nothing yet."""
        self._profiler = Profiler(async_mode="disabled")

    def start(self) -> None:
        """Begins to sample."""
        self._profiler.start()

    def stop(self) -> None:
        """Ends it."""
        self._profiler.stop()

    def write(self, path: str) -> None:
        """Writes a page to look at in a browser."""
        with open(path, "w", encoding="utf-8") as file:
            file.write(self._profiler.output(HTMLRenderer()))
