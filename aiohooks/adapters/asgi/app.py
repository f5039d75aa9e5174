"""A session in a web service: health, progress, waits for steps and a page, as an ASGI application.

    session = AsyncMonitoredSession(train_step, hooks=[...])

    async def train(session):
        async for loss in session.steps("loss", feeds=batches()):
            ...

    training = SessionService(session, train)
    app = Starlette(routes=[Mount("/training", training), ...], lifespan=training.lifespan)

Everything is read-only, unless `controls=True` lets clients stop and drain the session.
docs/guides/services.md lists which clients are served.

ASGI       the interface between Python's web servers and applications
lifespan   a message of ASGI at the start and the end of a server; the block between them
probe      a request of a supervisor, such as Kubernetes, for `health` or `ready`
endpoint   a coroutine function that answers the requests for one path
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.resources
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from typing import Any

from aiohooks._core.validate import check_callable, check_instance, check_secs
from aiohooks.adapters.asgi._access import (
    RETRY,
    AccessPolicy,
    JsonReply,
    encode_json,
    error_reply,
    safe_text,
)
from aiohooks.adapters.asgi._lifespan import (
    RunFunction,
    SessionRunner,
    notify_on_signals,
    request_drain,
)
from aiohooks.adapters.asgi._report import (
    ServiceHealth,
    SessionReporter,
    reached_reply,
    wait_for_step,
    while_connected,
)
from aiohooks.errors import InvalidArgumentError, missing_extra
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

_Endpoint = Callable[[Request], Awaitable[Response]]

_MAX_WAITERS = 10_000
_STEP = re.compile(r"[0-9]{1,16}")
_SECS = re.compile(r"[0-9]{1,5}(?:\.[0-9]{1,9})?")

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
_FILES = {
    "": ("index.html", "text/html"),
    "page.css": ("page.css", "text/css"),
    "page.js": ("page.js", "text/javascript"),
}


class SessionService:
    """An ASGI application that shows a session, and runs it if you pass the loop of steps as `run`.

    `lifespan` enters the session, runs the loop and leaves the session, all in one background task.
    The server serves requests from the start, even while the session opens, and continues when the
    session fails, which `health` reports. When the server ends, or gets SIGINT or SIGTERM, the
    session is asked to stop. Without `run` the service only shows a session that you enter
    elsewhere.

    Below the path at which it is mounted there are `health`, `ready`, `progress`, `steps/{n}`, a
    page, and with `controls` also `stop` and `drain`.
    """

    def __init__(
        self,
        session: AsyncMonitoredSession,
        run: RunFunction | None = None,
        *,
        allowed_hosts: Iterable[str] = (),
        allow_remote: bool = False,
        grace_secs: float = 10.0,
        drain_secs: float | None = None,
        controls: bool = False,
    ) -> None:
        """Create the service of a session that is not entered yet. Nothing is started.

        Args:
            session: the session to show.
            run: the loop of steps, a coroutine function that takes the session. When it returns,
                the session ends.
            allowed_hosts: the host names of the service, besides `localhost` and addresses.
            allow_remote: whether to serve other machines as well. Use it behind a proxy, or a
                middleware of your application, that controls access.
            grace_secs: how long the loop may continue after a stop. Then it is cancelled, and has
                this time again to end.
            drain_secs: how long the session may drain (`session.request_drain`) before it is
                stopped, after a signal, the end of the server or `POST drain`. A second signal
                stops it immediately. With None only `POST drain` drains, without a limit.
            controls: whether clients that can see the session may also stop and drain it, with
                `POST stop` and `POST drain` or the buttons of the page.
        """
        check_instance(session, AsyncMonitoredSession, "session")
        check_callable(run, "run", optional=True)
        check_secs(grace_secs, "grace_secs")
        check_secs(drain_secs, "drain_secs", optional=True)
        self._access = AccessPolicy(
            allowed_hosts=allowed_hosts,
            allow_remote=allow_remote,
        )
        self._session = session
        self._runner = None if run is None else SessionRunner(session, run, grace_secs, drain_secs)
        self._reporter = SessionReporter(session, self._runner)
        self._drain_secs = drain_secs
        self._controls: tuple[str, ...] = ("stop", "drain") if controls else ()
        self._waiters = 0
        self._app = self._make_app()

    @contextlib.asynccontextmanager
    async def lifespan(self, app: object = None) -> AsyncGenerator[None]:
        """Run the session during the block, alongside the server.

        Give it to an application, as in `Starlette(lifespan=service.lifespan)`, or enter it in the
        application's own lifespan.

        Raises:
            InvalidArgumentError: the service was not given `run`.
        """
        runner = self._runner
        if runner is None:
            raise InvalidArgumentError(
                "this service has no loop to run; give it one: SessionService(session, run)"
            )
        runner.start()
        with notify_on_signals(lambda name: runner.request_end(f"the server received {name}")):
            try:
                yield
            finally:
                await runner.stop("the server shuts down")

    def health(self) -> ServiceHealth:
        """Return the session's current health, as `GET health` does."""
        return self._reporter.health()

    async def __call__(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        """Serve one request, or the lifespan of a server, according to ASGI."""
        if scope["type"] == "websocket":
            # 1008 rejects the connection: a violation of the policy.
            await send({"type": "websocket.close", "code": 1008})
            return
        # The lifespan of a server.
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *_HEADERS]
            await send(message)

        path = scope["path"].removeprefix(scope.get("root_path", "")).strip("/")
        refusal = self._access.check_request(scope, controls=path in self._controls)
        app = self._app if refusal is None else _response(refusal)
        await app(scope, receive, send_with_headers)

    def _make_app(self) -> Starlette:
        """Return the application that serves the paths. `__call__` checks the requests before."""
        check_client = self._access.check_client
        routes = [
            Route("/health", self._probe(lambda health: health.ok)),
            Route("/ready", self._probe(lambda health: health.ready)),
            Route("/progress", _checked(check_client, self._serve_progress)),
            Route("/steps/{n}", _checked(check_client, self._serve_step)),
        ]
        for path in self._controls:
            endpoint = _checked(check_client, self._serve_control)
            routes.append(Route(f"/{path}", endpoint, methods=["POST"]))
        for path, (name, media_type) in _FILES.items():
            endpoint = _file_endpoint(name, media_type, bool(self._controls))
            routes.append(Route(f"/{path}", _checked(check_client, endpoint)))
        handlers: Any = {HTTPException: _not_found, Exception: _internal_error}
        lifespan = None if self._runner is None else self.lifespan
        app = Starlette(routes=routes, exception_handlers=handlers, lifespan=lifespan)
        # A redirect to a path with or without a slash would repeat the Host header of the client.
        app.router.redirect_slashes = False
        return app

    def _probe(self, is_good: Callable[[ServiceHealth], bool]) -> _Endpoint:
        """Return an endpoint with status 200 if the health is good, otherwise 503."""

        async def serve_probe(request: Request) -> Response:
            health = self.health()
            body: dict[str, Any] = {"state": health.state}
            # A client without access, such as a remote probe, gets the state only.
            if self._access.check_client(request.scope) is None:
                body = dataclasses.asdict(health)
            status = 200 if is_good(health) else 503
            return _response(JsonReply(status, body))

        return serve_probe

    async def _serve_progress(self, request: Request) -> Response:
        return _response(JsonReply(200, self._reporter.progress()))

    async def _serve_control(self, request: Request) -> Response:
        """Stop or drain the session, as the path says, and report the health after it."""
        if request.url.path.endswith("/stop"):
            self._session.request_stop("a client asked for a stop")
        else:
            request_drain(self._session, "a client asked for a drain", self._drain_secs)
        return _response(JsonReply(200, dataclasses.asdict(self.health())))

    async def _serve_step(self, request: Request) -> Response:
        """Check the step and the timeout of a request, and wait for the step."""
        step = request.path_params["n"]
        if not _STEP.fullmatch(step) or int(step) > MAX_STEP:
            message = (
                f"the step is {safe_text(step, 40)!r}: give a whole number from 0 to {MAX_STEP}"
            )
            return _response(error_reply(400, "bad_step", message))
        timeouts = request.query_params.getlist("timeout")
        if len(timeouts) > 1 or not all(map(_SECS.fullmatch, timeouts)):
            text = safe_text(", ".join(timeouts), 40)
            message = f"the timeout is {text!r}: give seconds once, from 0 to 99999"
            return _response(error_reply(400, "bad_timeout", message))
        timeout = float(timeouts[0]) if timeouts else None
        return _response(await self._step_reply(request, int(step), timeout))

    async def _step_reply(
        self,
        request: Request,
        wanted: int,
        timeout: float | None,
    ) -> JsonReply:
        """Return the reply to a wait for a step, which ends when the client disconnects."""
        reply = reached_reply(self._session, wanted)
        if reply is not None:
            return reply
        if self._waiters >= _MAX_WAITERS:
            message = f"{_MAX_WAITERS} clients are waiting already"
            return error_reply(503, "too_many", message, RETRY)
        self._waiters += 1
        try:
            wait = wait_for_step(self._reporter, wanted, timeout)
            return await while_connected(request.receive, wait)
        finally:
            self._waiters -= 1

    def __repr__(self) -> str:
        return f"<SessionService {self.health().state}, {self._waiters} waiters>"


def _checked(check: Callable[[Scope], JsonReply | None], serve: _Endpoint) -> _Endpoint:
    """Return an endpoint that serves the requests for which `check` returns no other reply."""

    async def endpoint(request: Request) -> Response:
        refusal = check(request.scope)
        if refusal is not None:
            return _response(refusal)
        return await serve(request)

    return endpoint


def _file_endpoint(name: str, media_type: str, has_controls: bool) -> _Endpoint:
    """Return an endpoint that serves a file of the page."""
    file = importlib.resources.files("aiohooks.adapters.asgi").joinpath("_page", name)
    content = file.read_bytes()
    if has_controls:
        # With this attribute, the page shows its buttons.
        content = content.replace(b"<html ", b"<html data-controls ")

    async def serve_file(request: Request) -> Response:
        return Response(content, media_type=media_type)

    return serve_file


def _response(reply: JsonReply) -> Response:
    return Response(encode_json(reply.body), reply.status, reply.headers, "application/json")


async def _not_found(request: Request, error: HTTPException) -> Response:
    message = "not found; see health, ready, progress and steps/N"
    return _response(error_reply(error.status_code, "not_found", message))


async def _internal_error(request: Request, error: Exception) -> Response:
    message = "the service could not answer; its log has the reason"
    return _response(error_reply(500, "internal_error", message))
