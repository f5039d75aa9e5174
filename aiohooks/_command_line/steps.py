"""`aiohooks steps URL`: show a run in a step store without joining the run."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
from collections.abc import Iterator

from aiohooks.errors import AiohooksError, InvalidArgumentError, printable
from aiohooks.stores import ExitReport, PublisherReport, RunReport, open_step_store


def print_run(url: str, run: str | None, *, address: str | None, as_json: bool) -> int:
    """Print the report of a run, and return the exit code.

    Raises:
        AiohooksError: the run does not exist, or its report cannot be read.
    """
    report = asyncio.run(_inspect_run(url, run, address))
    if as_json:
        print(json.dumps(dataclasses.asdict(report), indent=2))
    else:
        print("\n".join(_report_lines(report)))
    return 0


async def _inspect_run(url: str, run: str | None, address: str | None) -> RunReport:
    """Return the engine's report on a run.

    Raises:
        AiohooksError: the run does not exist, or the engine is unavailable.
        InvalidArgumentError: the URL is invalid, or its store belongs to a single process.
    """
    if url.startswith("memory:"):
        raise InvalidArgumentError(
            "memory:// is a store within one process; give the URL of a store that processes share"
        )
    is_on_ray = url.startswith("ray:")
    if address is not None and not is_on_ray:
        raise InvalidArgumentError(f"--address {address} is for a ray:// URL")
    async with contextlib.AsyncExitStack() as stack:
        if is_on_ray:
            # Import this only here, because it needs the extra `ray`.
            from aiohooks.distributed.ray import cluster_membership

            await stack.enter_async_context(cluster_membership(address, log_to_driver=False))
        store = open_step_store(url, run=run)
        stack.push_async_callback(store.aclose)
        report = await store.inspect()
    if report is None:
        raise AiohooksError(
            f"there is no run {store.run!r} in this step store; give the name of another run with"
            " --run"
        )
    return report


def _report_lines(report: RunReport) -> Iterator[str]:
    """Yield the lines of the report for people."""
    yield f"run {printable(report.run)}: step {report.step} of epoch {report.epoch}"
    yield f"  chief       {_describe_chief(report)}"
    for publisher in report.publishers:
        yield f"  publisher   {_describe_publisher(publisher)}"
    if not report.publishers:
        yield "  publisher   none"
    yield f"  waiting     {_describe_waiting(report.waiting)}"
    if report.last_exit is not None:
        yield f"  last exit   {_describe_exit(report.last_exit)}"
    if report.failure is not None:
        yield f"  failure     {printable(report.failure)}"


def _describe_chief(report: RunReport) -> str:
    if report.chief is not None:
        state = "initialised"
        if not report.initialised:
            state = "not initialised yet"
        return f"{printable(report.chief)}, term {report.term}, {state}"
    if report.term:
        return f"none; the last one had term {report.term}"
    return "none"


def _describe_publisher(publisher: PublisherReport) -> str:
    text = f"{printable(publisher.name)}, {printable(publisher.process)}"
    if publisher.lease_secs is not None:
        text += f", lease of {publisher.lease_secs:g} s, renewed {publisher.renewals} times"
    if publisher.waits_for is not None:
        text += f", waits for step {publisher.waits_for} itself"
    return text


def _describe_waiting(steps: tuple[int, ...] | None) -> str:
    if steps is None:
        return "the engine does not know the waiters"
    if not steps:
        return "no process"
    # Every run has reached step 0, so the engine uses it for waits that any change ends.
    wanted = ", ".join(f"step {step}" if step else "any change" for step in steps)
    processes = "1 process" if len(steps) == 1 else f"{len(steps)} processes"
    return f"{processes}: for {wanted}"


def _describe_exit(last_exit: ExitReport) -> str:
    name = printable(last_exit.name)
    if last_exit.lost:
        return f"{name} was found dead at step {last_exit.step}"
    if last_exit.error is None:
        return f"{name} finished at step {last_exit.step}"
    return f"{name} failed at step {last_exit.step}: {printable(last_exit.error)}"
