"""A session inside a web service: health, progress, waits for steps and a page, as an ASGI sub-application.

    session = AsyncMonitoredSession(train_step, hooks=[...])

    async def train(session):
        async for loss in session.steps("loss", feeds=batches()):
            ...

    training = SessionService(session, train)
    app = Starlette(routes=[Mount("/training", training), ...], lifespan=training.lifespan)

Everything is read-only. See docs/services.md for who is answered.
"""

from __future__ import annotations

import contextlib
import importlib.resources
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager
from typing import Any

from aiohooks._aio.clock import current_clock
from aiohooks._validate import check_callable, check_instance, check_secs
from aiohooks.adapters.asgi._access import Guard, Refusal, safe_text
from aiohooks.adapters.asgi._events import Answer, Events, WhileConnected, arrived, failed, known_store, reached
from aiohooks.adapters.asgi._lifespan import Loop, Owner, hearing_signals
from aiohooks.adapters.asgi._report import Rate, encoded, health, progress
from aiohooks.adapters.asgi._report import ServiceHealth as ServiceHealth
from aiohooks.errors import InvalidArgumentError
from aiohooks.hooks._extras import missing_extra
from aiohooks.hooks.history import HistoryHook
from aiohooks.hooks.timing import HookTimingHook
from aiohooks.session.monitored import AsyncMonitoredSession
from aiohooks.stores._protocol import MAX_STEP

try:
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route
    from starlette.types import Message, Receive, Scope, Send
except ImportError as _missing:
    raise missing_extra("aiohooks.adapters.asgi", "asgi") from _missing


_STEP = re.compile(r"[0-9]{1,16}")
_SECS = re.compile(r"[0-9]{1,6}(?:\.[0-9]{1,9})?")
_LONGEST_SECS = 86_400.0
_NOBODY_THERE = 499  # never seen by anybody: the client has left

_HEADERS = (
    (b"cache-control", b"no-store"),
    (
        b"content-security-policy",
        b"default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        b"base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-content-type-options", b"nosniff"),
)
_FILES = {"": ("index.html", "text/html"), "page.css": ("page.css", "text/css"), "page.js": ("page.js", "text/javascript")}


class SessionService:
    """An ASGI application that shows one session, and owns it if it is given the loop of steps.

    `lifespan` enters the session, runs the loop and leaves the session, all in one background task: the server serves
    meanwhile, also while the session opens, and goes on when the session fails, which `health` tells then. When the server
    ends, the session is asked to stop. Without `run` the session is somebody else's, and only shown.

    Below the path at which it is mounted there are `health`, `ready`, `progress`, `events`, `steps/{n}` and a page.
    """

    def __init__(
        self,
        session: AsyncMonitoredSession,
        run: Loop | None = None,
        *,
        history: HistoryHook | None = None,
        timing: HookTimingHook | None = None,
        title: str = "aiohooks",
        allowed_hosts: Iterable[str] = (),
        token: str | None = None,
        allow_remote: bool = False,
        grace_secs: float = 10.0,
        hear_signals: bool = True,
        refresh_secs: float = 0.5,
        max_waiters: int = 10_000,
        max_streams: int = 100,
    ) -> None:
        """Takes the session, which is not entered yet; nothing is started.

        Args:
            session: what is shown.
            run: the loop of steps, a coroutine function that is given the session; when it returns the session is left.
            history: the hook whose values the page draws.
            timing: the hook whose measurements of the others the page shows.
            title: what the page is called.
            allowed_hosts: the names by which the service is reached, besides `localhost` and addresses.
            token: what a client must send as `Authorization: Bearer ...` to be told more than the state.
            allow_remote: answer other machines as well, though there is no token, or no TLS; for services that have
                something in front of them that decides who may ask.
            grace_secs: how long the loop may go on after the server's end; it is cancelled then, and has as long again.
            hear_signals: whether SIGINT and SIGTERM stop the session at once, instead of when the server has waited for its
                last client. The signals stay the server's.
            refresh_secs: how much time lies between two events of a stream at least.
            max_waiters: how many clients may wait for a step.
            max_streams: how many clients may follow the events.

        Raises:
            InvalidArgumentError: one of the arguments cannot be meant.
        """
        check_instance(session, AsyncMonitoredSession, "session")
        check_callable(run, "run", optional=True)
        check_instance(history, HistoryHook, "history", optional=True)
        check_instance(timing, HookTimingHook, "timing", optional=True)
        check_instance(title, str, "title")
        check_secs(grace_secs, "grace_secs")
        check_secs(refresh_secs, "refresh_secs", positive=True)
        for most, what in ((max_waiters, "max_waiters"), (max_streams, "max_streams")):
            given: object = most
            if isinstance(given, bool) or not isinstance(given, int) or given < 0:
                raise InvalidArgumentError(f"{what} is {given!r}; give a whole number, 0 or more")
        self._guard = Guard(allowed_hosts=allowed_hosts, token=token, allow_remote=allow_remote)
        self._session = session
        self._owner = None if run is None else Owner(session, run, grace_secs)
        self._history = history
        self._timing = timing
        self._title = title
        self._hear_signals = hear_signals
        self._refresh_secs = refresh_secs
        self._max_waiters = max_waiters
        self._max_streams = max_streams
        self._waiters = self._streams = 0
        self._rate = Rate()
        self._app = self._application()

    # -- the session's life

    def lifespan(self, app: object = None) -> AbstractAsyncContextManager[None]:
        """The session's life beside the server's: `Starlette(lifespan=service.lifespan)`, or inside of another lifespan.

        Raises:
            InvalidArgumentError: the service was not given `run`.
        """
        if self._owner is None:
            raise InvalidArgumentError("this service has no loop to run; give it one: SessionService(session, run)")
        return self._life(self._owner)

    @contextlib.asynccontextmanager
    async def _life(self, owner: Owner) -> AsyncGenerator[None]:
        def heard(name: str) -> None:
            self._session.request_stop(f"the server received {name}")

        with hearing_signals(heard) if self._hear_signals else contextlib.nullcontext():
            owner.start()
            try:
                yield
            finally:
                await owner.stop("the server shuts down")

    def health(self) -> ServiceHealth:
        """How the session is now; what `GET health` tells."""
        return health(self._session, self._owner)

    # -- requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request, as ASGI says; as an application of its own also the lifespan."""
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *_HEADERS]
            await send(message)

        refusal = self._guard.refusal(scope)
        if refusal is not None:
            await _refused(refusal)(scope, receive, guarded)
        else:
            await self._app(scope, receive, guarded)

    def _application(self) -> Starlette:
        routes = [
            Route("/health", self._health),
            Route("/ready", self._ready),
            Route("/progress", self._progress),
            Route("/steps/{n}", self._step),
            Route("/events", _Endpoint(self._events), methods=["GET", "HEAD"]),
            *(Route(f"/{path}", self._file(*file)) for path, file in _FILES.items()),
        ]
        handlers: Any = {HTTPException: _not_there, Exception: _broken}
        app = Starlette(routes=routes, exception_handlers=handlers, lifespan=self.lifespan if self._owner else None)
        app.router.redirect_slashes = False  # a redirection would repeat what the client says of our name
        return app

    def _file(self, name: str, kind: str) -> Callable[[Request], Awaitable[Response]]:
        content = importlib.resources.files("aiohooks.adapters.asgi").joinpath("_page", name).read_bytes()

        async def serve(request: Request) -> Response:
            # Nothing of the session is in it; with a token it is the page that asks for the rest.
            refusal = self._guard.remote(request.scope)
            return Response(content, media_type=kind) if refusal is None else _refused(refusal)

        return serve

    async def _health(self, request: Request) -> Response:
        found = self.health()
        return self._told(request, found, found.ok)

    async def _ready(self, request: Request) -> Response:
        found = self.health()
        return self._told(request, found, found.ready)

    def _told(self, request: Request, found: ServiceHealth, good: bool) -> Response:
        body: dict[str, Any] = {"state": found.state}
        if self._guard.unknown(request.scope) is None:  # a probe from elsewhere is told the state and nothing else
            body.update(step=found.step, doing=found.doing, stop_reason=found.stop_reason, failure=found.failure)
        return _response(Answer(200 if good else 503, body))

    async def _progress(self, request: Request) -> Response:
        refusal = self._guard.unknown(request.scope)
        return _response(Answer(200, self._look())) if refusal is None else _refused(refusal)

    def _look(self) -> dict[str, Any]:
        return progress(
            self._session,
            self._owner,
            self._rate,
            current_clock().now(),
            title=self._title,
            history=self._history,
            timing=self._timing,
        )

    async def _step(self, request: Request) -> Response:
        refusal = self._guard.unknown(request.scope)
        if refusal is not None:
            return _refused(refusal)
        step, timeout = request.path_params["n"], request.query_params.getlist("timeout")
        if not _STEP.fullmatch(step) or int(step) > MAX_STEP:
            message = f"the step is {safe_text(step, 40)!r}: give a whole number from 0 to {MAX_STEP}"
            return _response(failed(400, "bad_step", message))
        if len(timeout) > 1 or not all(_SECS.fullmatch(each) and float(each) <= _LONGEST_SECS for each in timeout):
            message = f"the timeout is {safe_text(', '.join(timeout), 40)!r}: give seconds once, from 0 to {_LONGEST_SECS:.0f}"
            return _response(failed(400, "bad_timeout", message))
        wanted = int(step)
        store = known_store(self._session)
        at_once = None if store is None else arrived(store, wanted)
        if at_once is not None:
            return _response(at_once)
        if self._waiters >= self._max_waiters:
            return _response(failed(503, "too_many", f"{self._max_waiters} clients wait already", retry=True))
        self._waiters += 1
        answer = Answer(_NOBODY_THERE)
        try:
            async with WhileConnected(request.receive):
                answer = await reached(self._session, self._owner, wanted, float(timeout[0]) if timeout else None)
        finally:
            self._waiters -= 1
        return _response(answer)

    async def _events(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._guard.unknown(scope)
        if refusal is not None:
            await _refused(refusal)(scope, receive, send)
            return
        if self._streams >= self._max_streams:
            too_many = failed(503, "too_many", f"{self._max_streams} clients follow already", retry=True)
            await _response(too_many)(scope, receive, send)
            return
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"x-accel-buffering", b"no")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        if scope["method"] == "GET":
            self._streams += 1
            try:
                async with WhileConnected(receive):
                    await Events(self._session, self._owner, self._look, self._refresh_secs).tell(_writer(send))
            except TimeoutError:
                return  # it does not read, so it cannot be told that this is the end either
            finally:
                self._streams -= 1
        await send({"type": "http.response.body", "body": b""})

    def __repr__(self) -> str:
        return f"<SessionService {self.health().state}, {self._waiters} waiters, {self._streams} streams>"


class _Endpoint:
    """Makes of a method what Starlette takes for an application, and leaves alone."""

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)


def _writer(send: Send) -> Callable[[bytes], Awaitable[None]]:
    async def write(data: bytes) -> None:
        await send({"type": "http.response.body", "body": data, "more_body": True})

    return write


def _response(answer: Answer) -> Response:
    headers = {"retry-after": "1"} if answer.retry else None
    return Response(encoded(answer.body), answer.status, headers, "application/json")


def _refused(refusal: Refusal) -> Response:
    response = _response(failed(refusal.status, refusal.error, refusal.message))
    if refusal.status == 405:
        response.headers["allow"] = "GET, HEAD"
    if refusal.status == 401:
        response.headers["www-authenticate"] = "Bearer"
    return response


async def _not_there(request: Request, error: HTTPException) -> Response:
    return _response(failed(error.status_code, "not_found", "there is nothing here; see health, progress, events and steps/N"))


async def _broken(request: Request, error: Exception) -> Response:
    return _response(failed(500, "internal_error", "the service could not answer; its log says why"))
