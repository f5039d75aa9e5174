"""One run with the hooks around it: before_run, one merged run, after_run."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from typing import Any

from aiohooks._aio.gather import FanOut, drive
from aiohooks._validate import check_mapping
from aiohooks.graph.graph import Graph
from aiohooks.graph.session import Session
from aiohooks.session._hooks import Calls, HookSet
from aiohooks.session._requests import Joined, Joiner, check_requests, options_of
from aiohooks.session.coordinator import Coordinator
from aiohooks.session.hook import SessionRunArgs, SessionRunContext, SessionRunValues


class HookedRun:
    """Runs a session with hooks; knows nothing of stopping, recovery and turns."""

    def __init__(self, hooks: HookSet, graph: Graph) -> None:
        """Keeps what all runs have in common."""
        self._hooks = hooks
        self.fan: FanOut = FanOut()
        """Tells what a run that goes on is doing; runs take turns."""
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
        if options is not None:
            check_mapping(options, "options")
        fan = self.fan
        if self._no_hooks:
            fan.began = None if fan.now is None else fan.now()
            if options is None:
                return session.run(fetches, feed_dict=feed_dict)
            return session.run(fetches, feed_dict=feed_dict, options=options, run_metadata={})
        context = SessionRunContext((fetches, feed_dict, options), session, coord, global_step=step, attempt=attempt)
        fan.base = base
        fan.began = None
        return drive(self._run(fan, session, context), fan)

    async def _run(self, fan: FanOut, session: Session, context: SessionRunContext) -> Any:
        # The two phases are `call_tier` written out: this is the path of every run, and a coroutine less is a tenth of it.
        hooks = self._hooks
        step = context.global_step
        requests: list[SessionRunArgs | None] = []
        for tier in hooks.before_run:
            fan.piece = (Calls, tier, context, None, requests, len(requests), step)
            try:
                for method in tier.methods:
                    requests.append(await method(context))
                    if fan.crew is not None:
                        break
            except BaseException as error:
                await fan.failed(error)
            else:
                if fan.crew is not None:
                    await fan.crew.settle(None)
            finally:
                fan.piece = fan.crew = None
        if requests.count(None) == len(requests):
            joined = None
            fetches, feeds, options = context.fetches, context.feed_dict, context.options
        else:
            joined, feeds, options = self._join(context, requests)
            fetches = joined.nodes
        if type(session) is Session and "run" not in session.__dict__:
            session.driven_by = fan  # its operations overlap under the same `drive`
        metadata: dict[str, Any] | None = None
        if options is None:
            values = await session.run(fetches, feed_dict=feeds)
        else:
            metadata = {}
            values = await session.run(fetches, feed_dict=feeds, options=options, run_metadata=metadata)
        if not hooks.after_run:
            return values if joined is None else joined.caller(values)
        nothing = _NOTHING if options is None else SessionRunValues(None, options, metadata)
        if joined is None:
            result: Any = values
            answers: list[SessionRunValues] = []
        else:
            result = joined.caller(values)
            answers = [SessionRunValues(part(values), options, metadata) for part in joined.parts]
            answers.append(nothing)
        context.global_step = step = session.committed_step
        for tier, places in zip(hooks.after_run, hooks.answers):  # noqa: B905 - of one length
            if joined is None:
                own: Sequence[SessionRunValues] = (nothing,) * tier.size
            else:
                own = [nothing if place is None else answers[joined.which[place]] for place in places]
            results: list[None] = []
            fan.piece = (Calls, tier, context, own, results, 0, step)
            try:
                for method, answer in zip(tier.methods, own):  # noqa: B905 - of one length
                    results.append(await method(context, answer))
                    if fan.crew is not None:
                        break
            except BaseException as error:
                await fan.failed(error)
            else:
                if fan.crew is not None:
                    await fan.crew.settle(None)
            finally:
                fan.piece = fan.crew = None
        return result

    def _join(
        self, context: SessionRunContext, requests: list[SessionRunArgs | None]
    ) -> tuple[Joined, Mapping[Any, Any] | None, Mapping[str, Any] | None]:
        """What the caller and the hooks ask for together: fetches, feeds and options."""
        wanted = [context.fetches]
        fetches_only = True
        for request in requests:
            if request is None:
                wanted.append(None)
                continue
            if type(request) is not SessionRunArgs:
                check_requests(requests, self._hooks.asked_names)
            wanted.append(request[0])
            if request[1] or request[2] is not None:
                fetches_only = False
        joined = self._joiner.fetches(wanted)
        if fetches_only:
            return joined, context.feed_dict, context.options
        feeds = self._joiner.feeds(context.feed_dict, requests, self._hooks.asked_names)
        return joined, feeds, options_of(context.options, requests)


_NOTHING = SessionRunValues(None, None, None)
