"""Hooks that overlap under packages which keep their state in context variables: spans of an HTTP
client, bound log variables.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

import httpx
import pytest
import structlog
from opentelemetry import trace
from opentelemetry.instrumentation.httpx import HTTPXClientInstrumentor

import aiohooks as ah
from tests.adapters.test_opentelemetry import Telemetry
from tests.support.hooks import PhaseHook
from tests.support.sessions import doubling, run_session

pytestmark = pytest.mark.every_python
Work = Callable[[str], Awaitable[None]]
NAMES = ("first", "second", "third")


async def in_a_group(work: Work) -> None:
    """Call functions as hooks, each of which does the work with its name."""
    await ah.compose_functions([partial(work, name) for name in NAMES])()


async def in_a_session(work: Work) -> None:
    """Make a run with hooks that do the work before it."""
    hooks = [PhaseHook("before_run", lambda *_, name=name: work(name)) for name in NAMES]
    await run_session(doubling(*hooks), 1, (), {"batch": 1})


@pytest.mark.parametrize("call_hooks", [in_a_group, in_a_session])
async def test_spans_and_bound_variables(call_hooks: Callable[[Work], Awaitable[None]]) -> None:
    """Each request is a span within its own hook's, within the caller's; what a hook binds is in
    its lines only.
    """
    telemetry, all_here = Telemetry(), asyncio.Barrier(len(NAMES))
    logged: list[dict[str, object]] = []

    async def answer(request: httpx.Request) -> httpx.Response:
        await all_here.wait()
        return httpx.Response(200)

    async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as client:
        HTTPXClientInstrumentor().instrument_client(client, tracer_provider=telemetry.provider)

        async def work(name: str) -> None:
            with (
                telemetry.tracer.start_as_current_span(name),
                structlog.contextvars.bound_contextvars(hook=name),
            ):
                await client.get(f"http://service/{name}")
                logged.append(structlog.contextvars.get_contextvars())

        with (
            telemetry.tracer.start_as_current_span("caller") as span,
            structlog.contextvars.bound_contextvars(request=7),
        ):
            await call_hooks(work)
            assert trace.get_current_span() is span
            assert structlog.contextvars.get_contextvars() == {"request": 7}
    spans = [
        ("caller", None),
        *((name, "caller") for name in NAMES),
        *(("GET", name) for name in NAMES),
    ]
    assert sorted(telemetry.tree(), key=str) == sorted(spans, key=str)
    assert sorted(logged, key=str) == [{"request": 7, "hook": name} for name in NAMES]
