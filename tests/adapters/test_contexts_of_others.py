"""Hooks that overlap under packages which keep their state in context variables: spans of an HTTP client, bound log variables."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import httpx
import pytest
import structlog
from opentelemetry import trace
from opentelemetry.instrumentation.httpx import HTTPXClientInstrumentor

import aiohooks as ah
from tests.adapters.test_opentelemetry import Telemetry
from tests.support.hooks import PhaseHook
from tests.support.sessions import double

pytestmark = pytest.mark.every_python
Work = Callable[[str], Awaitable[None]]
NAMES = ("first", "second", "third")


async def in_a_group(work: Work) -> None:
    """Call hooks of a class of one's own, each of which does the work with its name."""

    class Lifecycle:
        async def called(self) -> None: ...

    class Hook(Lifecycle):
        def __init__(self, name: str) -> None:
            self.name = name

        async def called(self) -> None:
            await work(self.name)

    await ah.compose(Lifecycle, [Hook(name) for name in NAMES]).called()


async def in_a_session(work: Work) -> None:
    """Make a run with hooks that do the work before it."""

    def hook(name: str) -> PhaseHook:
        return PhaseHook("before_run", lambda *_: work(name))

    async with ah.AsyncMonitoredSession(double, [hook(name) for name in NAMES]) as session:
        await session.run((), {"batch": 1})


class Together:
    """Lets calls continue when all of them have come: they overlap."""

    def __init__(self) -> None:
        self._missing = len(NAMES)
        self._all_here = asyncio.Event()

    async def wait(self) -> None:
        """Wait for the others."""
        self._missing -= 1
        if not self._missing:
            self._all_here.set()
        await self._all_here.wait()


@pytest.mark.parametrize("call_hooks", [in_a_group, in_a_session])
async def test_spans_of_an_instrumented_client(call_hooks: Callable[[Work], Awaitable[None]]) -> None:
    """Each request is a span within its own hook's, which is within the caller's; that is the current one afterwards."""
    telemetry, together = Telemetry(), Together()

    async def answer(request: httpx.Request) -> httpx.Response:
        await together.wait()
        return httpx.Response(200)

    async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as client:
        HTTPXClientInstrumentor().instrument_client(client, tracer_provider=telemetry.provider)

        async def work(name: str) -> None:
            with telemetry.tracer.start_as_current_span(name):
                await client.get(f"http://service/{name}")

        with telemetry.tracer.start_as_current_span("caller") as span:
            await call_hooks(work)
            assert trace.get_current_span() is span
    assert sorted(telemetry.tree(), key=str) == sorted(
        [("caller", None), *((name, "caller") for name in NAMES), *(("GET", name) for name in NAMES)], key=str
    )


@pytest.mark.parametrize("call_hooks", [in_a_group, in_a_session])
async def test_bound_variables_of_a_log(call_hooks: Callable[[Work], Awaitable[None]]) -> None:
    """What a hook binds for a block is in its own lines only, with what the caller has bound, and nowhere afterwards."""
    together = Together()
    logged: list[dict[str, object]] = []

    async def work(name: str) -> None:
        with structlog.contextvars.bound_contextvars(hook=name):
            await together.wait()
            logged.append(structlog.contextvars.get_contextvars())

    with structlog.contextvars.bound_contextvars(request=7):
        await call_hooks(work)
        assert structlog.contextvars.get_contextvars() == {"request": 7}
    assert sorted(logged, key=str) == [{"request": 7, "hook": name} for name in NAMES]
