"""`aiohooks steps URL`: show a run in a step store, from outside."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys
from collections.abc import Iterator

from aiohooks.errors import InvalidArgumentError, printable
from aiohooks.stores import ExitReport, PublisherReport, RunReport, open_step_store


def print_run(url: str, run: str | None, *, address: str | None, as_json: bool) -> int:
    """Print what the engine has of a run.

    Returns:
        The exit code: 0, or 1 if there is no such run.
    """
    name, report = asyncio.run(inspect_run(url, run, address))
    if report is None:
        print(no_run(name), file=sys.stderr)
        return 1
    if as_json:
        print(json.dumps(dataclasses.asdict(report), indent=2))
    else:
        print("\n".join(_lines(report)))
    return 0


def no_run(name: str) -> str:
    """Return the message for a run that a step store does not have."""
    return f"there is no run {name!r} in this step store; give the name of another one with --run"


async def inspect_run(
    url: str, run: str | None, address: str | None, *, secs: float | None = None
) -> tuple[str, RunReport | None]:
    """Return the name of a run, and what the engine has of it; raise `TimeoutError` if it does not
    answer within `secs`.
    """
    if url.startswith("memory:"):
        raise InvalidArgumentError(
            "memory:// is a store within one process; give the URL of one that processes share"
        )
    options = {} if address is None else {"address": address}
    store = open_step_store(url, run=run, **options)
    try:
        async with asyncio.timeout(secs):
            return store.run, await store.inspect()
    finally:
        await store.aclose()


def _lines(report: RunReport) -> Iterator[str]:
    yield f"run {printable(report.run)}: step {report.step} of epoch {report.epoch}"
    term = f"term {report.term}, {'initialised' if report.initialised else 'not initialised yet'}"
    chief = f"{printable(report.chief)}, {term}" if report.chief is not None else "none"
    if report.chief is None and report.term:
        chief += f"; the last one had term {report.term}"
    yield f"  chief       {chief}"
    for publisher in report.publishers:
        yield f"  publisher   {describe_publisher(publisher)}"
    if not report.publishers:
        yield "  publisher   none"
    yield f"  waiting     {_describe_waiting(report.waiting)}"
    if report.last_exit is not None:
        yield f"  last exit   {_describe_exit(report.last_exit)}"
    if report.failure is not None:
        yield f"  failure     {printable(report.failure)}"


def describe_publisher(publisher: PublisherReport) -> str:
    """Return what the engine has of a publisher."""
    text = f"{printable(publisher.name)}, {printable(publisher.process)}"
    if publisher.lease_secs is not None:
        text += f", lease of {publisher.lease_secs:g} s, renewed {publisher.renewals} times"
    return (
        text
        if publisher.waits_for is None
        else f"{text}, waits for step {publisher.waits_for} itself"
    )


def _describe_waiting(steps: tuple[int, ...] | None) -> str:
    if steps is None:
        return "the engine does not know the waiters"
    if not steps:
        return "no process"
    wanted = ["any change" if step == 0 else f"step {step}" for step in steps]
    return f"{len(steps)} {'process' if len(steps) == 1 else 'processes'}: for {', '.join(wanted)}"


def _describe_exit(left: ExitReport) -> str:
    if left.lost:
        return f"{printable(left.name)} was found dead at step {left.step}"
    if left.error is None:
        return f"{printable(left.name)} finished at step {left.step}"
    return f"{printable(left.name)} failed at step {left.step}: {printable(left.error)}"
