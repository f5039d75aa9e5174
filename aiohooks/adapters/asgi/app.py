"""A session inside a web service: health, progress, waits for steps and a page, as an ASGI
sub-application.

    session = AsyncMonitoredSession(train_step, hooks=[...])

    async def train(session):
        async for loss in session.steps("loss", feeds=batches()):
            ...

    training = SessionService(session, train)
    app = Starlette(routes=[Mount("/training", training), ...], lifespan=training.lifespan)

Everything is read-only, unless `controls=True` lets clients pause and drain the session.
docs/guides/services.md says which clients are served.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.resources
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, Any

from aiohooks._core.validate import check_callable, check_instance, check_secs, checked_int
from aiohooks.adapters.asgi._access import (
    CONTROL_METHOD,
    AccessPolicy,
    JsonReply,
    encode_json,
    error_reply,
    safe_text,
)
from aiohooks.adapters.asgi._events import (
    reached_reply,
    store_of,
    wait_for_step,
    while_connected,
    write_events,
)
from aiohooks.adapters.asgi._lifespan import Loop, SessionRunner, notify_on_signals
from aiohooks.adapters.asgi._report import ServiceHealth as ServiceHealth
from aiohooks.adapters.asgi._report import SessionReporter
from aiohooks.errors import InvalidArgumentError, missing_extra
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

if TYPE_CHECKING:
    from aiohooks.adapters.prometheus import PrometheusHook

_STEP = re.compile(r"[0-9]{1,16}")
_SECS = re.compile(r"[0-9]{1,6}(?:\.[0-9]{1,9})?")
_MAX_TIMEOUT_SECS = 86_400.0
_CLIENT_CLOSED_REQUEST = 499  # nginx's code for a client that has disconnected; it is never sent

_HEADERS = (
    (b"cache-control", b"no-store"),
    (
        b"content-security-policy",
        (
            b"default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
            b"base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        ),
    ),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-content-type-options", b"nosniff"),
)
_HEADERS_OF_STATUS = {401: {"www-authenticate": "Bearer"}, 405: {"allow": "GET, HEAD"}}
_CONTROLS = ("pause", "resume", "drain")
_FILES = {
    "": ("index.html", "text/html"),
    "page.css": ("page.css", "text/css"),
    "page.js": ("page.js", "text/javascript"),
}


class SessionService:
    """An ASGI application that shows one session, and runs it if it is given the loop of steps.

    `lifespan` enters the session, runs the loop and leaves the session, all in one background task.
    The server serves requests from the start, also while the session opens, and continues when the
    session fails, which `health` reports. When the server ends, the session is asked to stop.
    Without `run` the session is entered elsewhere, and only shown.

    Below the path at which it is mounted there are `health`, `ready`, `progress`, `events`,
    `steps/{n}`, a page, `metrics` if it is given them, and with `controls` also `pause`, `resume`,
    `drain` and `why`, the wait-for graph of `session.why()`.
    """

    # Each of the many arguments is an option that is set by itself: an object of options would only
    # be one more name to import.
    def __init__(
        self,
        session: AsyncMonitoredSession,
        run: Loop | None = None,
        *,
        timing: HookTimingHook | None = None,
        metrics: PrometheusHook | None = None,
        title: str | None = None,
        allowed_hosts: Iterable[str] = (),
        token: str | None = None,
        allow_remote: bool = False,
        grace_secs: float = 10.0,
        stop_on_signals: bool = True,
        drain_secs: float | None = None,
        controls: bool = False,
        refresh_secs: float = 0.5,
        max_waiters: int = 10_000,
        max_streams: int = 100,
    ) -> None:
        """Make the service of a session that is not entered yet; nothing is started.

        Args:
            session: the session to show.
            run: the loop of steps, a coroutine function that takes the session; when it returns the
                session is left.
            timing: the hook whose measurements of the other hooks the page shows.
            metrics: the hook of the session whose registry `metrics` shows to Prometheus.
            title: the title of the page; by default the session's name.
            allowed_hosts: the host names of the service, besides `localhost` and addresses.
            token: what a client must send as `Authorization: Bearer ...` to get more than the
                state.
            allow_remote: serve other machines as well, even without a token or without TLS; for
                services behind a proxy that controls access.
            grace_secs: how long the loop may continue after the server's end; then it is cancelled,
                and has as long again.
            stop_on_signals: whether SIGINT and SIGTERM stop the session immediately, and not only
                when the server has waited for its last client. The server's own handlers are called
                as before.
            drain_secs: how long the session may finish what it has under way, after such a signal,
                the server's end or `POST drain`, before it is stopped: `session.request_drain`. A
                second signal stops it. None: no drain, except by `POST drain`, for which there is
                no limit then.
            controls: whether clients that may see the session may also pause, resume and drain it,
                by `POST pause` and so on or buttons, and ask why it waits, which names lines of its
                code.
            refresh_secs: the minimum time between two events of a stream.
            max_waiters: how many clients may wait for a step at the same time.
            max_streams: how many clients may follow the events at the same time.
        """
        check_instance(session, AsyncMonitoredSession, "session")
        check_callable(run, "run", optional=True)
        check_instance(timing, HookTimingHook, "timing", optional=True)
        if metrics is not None:
            from aiohooks.adapters.prometheus import PrometheusHook  # an extra of its own

            check_instance(metrics, PrometheusHook, "metrics")
        check_instance(title, str, "title", optional=True)
        check_secs(grace_secs, "grace_secs")
        check_secs(drain_secs, "drain_secs", optional=True)
        check_secs(refresh_secs, "refresh_secs", positive=True)
        max_waiters = checked_int(max_waiters, "max_waiters")
        max_streams = checked_int(max_streams, "max_streams")
        self._access = AccessPolicy(
            allowed_hosts=allowed_hosts, token=token, allow_remote=allow_remote
        )
        self._session = session
        self._runner = None if run is None else SessionRunner(session, run, grace_secs, drain_secs)
        self._reporter = SessionReporter(session, self._runner, title=title, timing=timing)
        self._metrics = metrics
        self._stop_on_signals = stop_on_signals
        self._drain_secs = drain_secs
        self._controls = controls
        self._refresh_secs = refresh_secs
        self._max_waiters = max_waiters
        self._max_streams = max_streams
        self._waiters = self._streams = 0
        self._app = self._make_app()

    @contextlib.asynccontextmanager
    async def lifespan(self, app: object = None) -> AsyncGenerator[None]:
        """Run the session beside the server: `Starlette(lifespan=service.lifespan)`, or inside
        another lifespan.

        Raises:
            InvalidArgumentError: the service was not given `run`.
        """
        if (runner := self._runner) is None:
            raise InvalidArgumentError(
                "this service has no loop to run; give it one: SessionService(session, run)"
            )
        runner.start()
        stop = notify_on_signals(lambda name: runner.request_end(f"the server received {name}"))
        with stop if self._stop_on_signals else contextlib.nullcontext():
            try:
                yield
            finally:
                await runner.stop("the server shuts down")

    def health(self) -> ServiceHealth:
        """Return the session's current health, as `GET health` does."""
        return self._reporter.health()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request according to ASGI; as the server's own application also the
        lifespan.
        """
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *_HEADERS]
            await send(message)

        path = scope["path"].removeprefix(scope.get("root_path", "")).strip("/")
        refusal = self._access.check_request(scope, controls=self._controls and path in _CONTROLS)
        app = self._app if refusal is None else _response(refusal)
        await app(scope, receive, send_with_headers)

    def _make_app(self) -> Starlette:
        client, anyone = self._access.check_client, self._access.check_connection
        routes = [
            Route("/health", self._serve_probe),
            Route("/ready", self._serve_probe),
            Route("/progress", _endpoint(self._serve_progress, client)),
            Route("/steps/{n}", _endpoint(self._serve_step, client)),
            Route("/events", self._serve_events),
            # No token is needed: the files contain nothing of the session, and the page sends the
            # token itself.
            *(
                Route(f"/{path}", _endpoint(_file_server(*file, self._controls), anyone))
                for path, file in _FILES.items()
            ),
        ]
        if self._metrics is not None:
            routes.append(Route("/metrics", _endpoint(self._serve_metrics, client)))
        if self._controls:
            routes += [
                Route(f"/{path}", _endpoint(self._serve_control, client), methods=["POST"])
                for path in _CONTROLS
            ]
            routes.append(Route("/why", _endpoint(self._serve_why, client)))
        handlers: Any = {HTTPException: _not_found, Exception: _internal_error}
        app = Starlette(
            routes=routes,
            exception_handlers=handlers,
            lifespan=self.lifespan if self._runner else None,
        )
        app.router.redirect_slashes = False  # a redirect would repeat the Host header of the client
        return app

    async def _serve_probe(self, request: Request) -> Response:
        health = self.health()
        good = health.ready if request.url.path.endswith("/ready") else health.ok
        # A client without access, such as a remote probe, gets the state.
        details = self._access.check_client(request.scope) is None
        return _response(
            JsonReply(
                200 if good else 503,
                dataclasses.asdict(health) if details else {"state": health.state},
            )
        )

    async def _serve_metrics(self, request: Request) -> Response:
        assert self._metrics is not None
        content, content_type = self._metrics.exposition(request.headers.get("accept", ""))
        return Response(content, headers={"content-type": content_type})

    async def _serve_progress(self, request: Request) -> JsonReply:
        return JsonReply(200, self._reporter.progress())

    async def _serve_why(self, request: Request) -> JsonReply:
        return JsonReply(200, self._reporter.why())

    async def _serve_control(self, request: Request) -> JsonReply:
        match request.url.path.rpartition("/")[2]:
            case "pause":
                self._session.pause("a client asked for a pause")
            case "resume":
                self._session.resume()
            case _:
                self._session.request_drain("a client asked for a drain", secs=self._drain_secs)
        health = dataclasses.asdict(self.health())
        return JsonReply(
            200, {name: health[name] for name in ("state", "step", "pause_reason", "drain_reason")}
        )

    async def _serve_step(self, request: Request) -> JsonReply:
        step, timeout = request.path_params["n"], request.query_params.getlist("timeout")
        if not _STEP.fullmatch(step) or int(step) > MAX_STEP:
            message = (
                f"the step is {safe_text(step, 40)!r}: give a whole number from 0 to {MAX_STEP}"
            )
            return error_reply(400, "bad_step", message)
        if len(timeout) > 1 or not all(
            _SECS.fullmatch(text) and float(text) <= _MAX_TIMEOUT_SECS for text in timeout
        ):
            given = safe_text(", ".join(timeout), 40)
            message = (
                f"the timeout is {given!r}: give seconds once, from 0 to {_MAX_TIMEOUT_SECS:.0f}"
            )
            return error_reply(400, "bad_timeout", message)
        wanted = int(step)
        store = store_of(self._session)
        reply = None if store is None else reached_reply(store, wanted)
        if reply is not None:
            return reply
        if self._waiters >= self._max_waiters:
            return error_reply(
                503, "too_many", f"{self._max_waiters} clients are waiting already", retry=True
            )
        self._waiters += 1
        wait = wait_for_step(self._reporter, wanted, float(timeout[0]) if timeout else None)
        try:
            return await while_connected(request.receive, wait, JsonReply(_CLIENT_CLOSED_REQUEST))
        finally:
            self._waiters -= 1

    async def _serve_events(self, request: Request) -> Any:
        refusal = self._access.check_client(request.scope)
        if refusal is None and self._streams >= self._max_streams:
            refusal = error_reply(
                503,
                "too_many",
                f"{self._max_streams} clients follow the events already",
                retry=True,
            )
        return self._stream_events if refusal is None else _response(refusal)

    async def _stream_events(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def write(data: bytes) -> None:
            await send({"type": "http.response.body", "body": data, "more_body": True})

        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"x-accel-buffering", b"no"),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        if scope["method"] == "GET":
            self._streams += 1
            try:
                await while_connected(
                    receive, write_events(self._reporter, self._refresh_secs, write), None
                )
            except TimeoutError:
                return  # the client does not read, so the end of the body would not arrive either
            finally:
                self._streams -= 1
        await send({"type": "http.response.body", "body": b""})

    def __repr__(self) -> str:
        return (
            f"<SessionService {self.health().state}, {self._waiters} waiters, {self._streams}"
            " streams>"
        )


def _endpoint(
    serve: Callable[[Request], Awaitable[Response | JsonReply]],
    check: Callable[[Scope], JsonReply | None],
) -> Callable[[Request], Awaitable[Response]]:
    """Return what answers requests that pass a check, and refuses the others."""

    async def endpoint(request: Request) -> Response:
        reply = check(request.scope) or await serve(request)
        return _response(reply) if isinstance(reply, JsonReply) else reply

    return endpoint


def _file_server(
    name: str, media_type: str, controls: bool
) -> Callable[[Request], Awaitable[Response]]:
    content = (
        importlib.resources.files("aiohooks.adapters.asgi").joinpath("_page", name).read_bytes()
    )
    if controls:
        content = content.replace(b"<html ", b"<html data-controls ")  # which shows the buttons

    async def serve_file(request: Request) -> Response:
        return Response(content, media_type=media_type)

    return serve_file


def _response(reply: JsonReply) -> Response:
    headers = {
        **_HEADERS_OF_STATUS.get(reply.status, {}),
        **({"retry-after": "1"} if reply.retry else {}),
    }
    if reply is CONTROL_METHOD:
        headers["allow"] = "POST"
    return Response(encode_json(reply.body), reply.status, headers, "application/json")


async def _not_found(request: Request, error: HTTPException) -> Response:
    return _response(
        error_reply(
            error.status_code, "not_found", "not found; see health, progress, events and steps/N"
        )
    )


async def _internal_error(request: Request, error: Exception) -> Response:
    return _response(
        error_reply(500, "internal_error", "the service could not answer; its log says why")
    )
