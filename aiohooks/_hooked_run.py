"""One run with the hooks around it: before_run, one merged run, after_run."""

from __future__ import annotations

from collections.abc import Awaitable, Coroutine, Mapping
from typing import Any

from aiohooks._coordinator import Coordinator
from aiohooks._fan_out import FanOut, drive
from aiohooks._graph import Graph
from aiohooks._hook import SessionRunArgs, SessionRunContext, SessionRunValues
from aiohooks._join import Joiner, check_requests, options_of
from aiohooks._phases import HookSet, call_tier
from aiohooks._session import Session


class HookedRun:
    """Runs a session with hooks; knows nothing of stopping, recovery and turns."""

    def __init__(self, hooks: HookSet, graph: Graph) -> None:
        """Keeps what all runs have in common."""
        self._hooks = hooks
        self._fan = FanOut()
        self._no_hooks = not hooks.before_run and not hooks.after_run
        self._joiner = Joiner(graph)

    def __call__(
        self,
        session: Session,
        coord: Coordinator,
        step: int,
        attempt: int,
        fetches: Any,
        feed_dict: Mapping[Any, Any] | None,
        options: Mapping[str, Any] | None,
        base: int,
    ) -> Awaitable[Any]:
        """One attempt at `step`, to be awaited at once; gives the caller's part of its values.

        `base` is how many cancels the running task has been through.
        """
        if self._no_hooks:
            return _run(session, fetches, feed_dict, options, None if options is None else {})
        context = SessionRunContext((fetches, feed_dict, options), session, coord, global_step=step, attempt=attempt)
        fan = self._fan  # runs take turns
        fan.base = base
        return drive(self._run(fan, session, context), fan)

    async def _run(self, fan: FanOut, session: Session, context: SessionRunContext) -> Any:
        hooks = self._hooks
        fetches, feeds, options = context.fetches, context.feed_dict, context.options
        requests: list[SessionRunArgs | None] = []
        for tier in hooks.before_run:
            await call_tier(fan, tier, context, None, requests, context.global_step)
        wanted = [fetches]
        asks = feeds_too = False
        for request in requests:
            if request is None:
                wanted.append(None)
                continue
            if type(request) is not SessionRunArgs:
                check_requests(requests, hooks.asked_names)
            asks = True
            wanted.append(request[0])
            if request[1] or request[2] is not None:
                feeds_too = True
        if feeds_too:
            feeds = self._joiner.feeds(feeds, requests, hooks.asked_names)
            options = options_of(options, requests)
        metadata: dict[str, Any] | None = None if options is None else {}
        joined = self._joiner.fetches(wanted) if asks else None
        if type(session) is Session and "run" not in session.__dict__:
            session.driven_by = fan  # its operations overlap under the same `drive`
        values = await _run(session, fetches if joined is None else joined.nodes, feeds, options, metadata)
        result = values if joined is None else joined.caller(values)
        if hooks.after_run:
            context.global_step = step = session.committed_step
            nothing = SessionRunValues(None, options, metadata)
            parts = () if joined is None else joined.parts
            answers = [SessionRunValues(part(values), options, metadata) for part in parts]
            answers.append(nothing)
            which = hooks.no_answers if joined is None else joined.which
            for tier, places in zip(hooks.after_run, hooks.answers, strict=True):
                own = [nothing if place is None else answers[which[place]] for place in places]
                await call_tier(fan, tier, context, own, [], step)
        return result


def _run(
    session: Session,
    fetches: Any,
    feed_dict: Mapping[Any, Any] | None,
    options: Mapping[str, Any] | None,
    metadata: dict[str, Any] | None,
) -> Coroutine[Any, Any, Any]:
    if options is None:
        return session.run(fetches, feed_dict=feed_dict)
    return session.run(fetches, feed_dict=feed_dict, options=options, run_metadata=metadata)
