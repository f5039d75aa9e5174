"""TensorFlow 1.x (`tf.compat.v1`): its graph as the graph of a session, and hooks that were written
for it, unchanged.

    creator = TensorFlowSessionCreator(tf.train.ChiefSessionCreator(checkpoint_dir="checkpoints"))
    hooks = TensorFlowHooks([tf.train.StopAtStepHook(last_step=1000),
    tf.train.LoggingTensorHook(["loss:0"], every_n_iter=100)]) async with
    AsyncMonitoredSession(creator, [hooks, *hooks_of_this_library]) as session:
        while not session.should_stop():
            await session.run(train_op)

TensorFlow creates, restores, runs and closes its session, and its hooks are called, in worker
threads; the event loop continues.
"""

# The package has no types.
# pyright: reportUntypedBaseClass=false, reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false
from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Generator, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from aiohooks import errors
from aiohooks._aio.cancel import DEFAULT_GRACE_SECS, to_thread
from aiohooks._aio.clock import sleep
from aiohooks._validate import checked_objects
from aiohooks.errors import (
    FeedConflictError,
    FetchError,
    GraphError,
    InvalidHookError,
    add_origin,
    missing_extra,
)
from aiohooks.graph.graph import Graph, Node, get_default_graph
from aiohooks.graph.plan import Leaves, canonical_feeds
from aiohooks.graph.session import Session
from aiohooks.hooks.blocking import BlockingHook
from aiohooks.session.coordinator import Coordinator
from aiohooks.session.hook import SessionRunArgs, SessionRunContext, SessionRunValues
from aiohooks.stores.memory import MemoryStepStore

try:
    import tensorflow  # pyright: ignore[reportMissingModuleSource]
except ImportError as _missing:
    raise missing_extra("aiohooks.adapters.tensorflow", "tensorflow") from _missing

__all__ = [
    "AbortedError",
    "OutOfRangeError",
    "TensorFlowGraph",
    "TensorFlowHooks",
    "TensorFlowSession",
    "TensorFlowSessionCreator",
    "UnavailableError",
]

tf: Any = tensorflow.compat.v1

if TYPE_CHECKING:  # it has no types
    _OpError = Exception
    _OutOfRangeError = Exception
    _AbortedError = Exception
    _UnavailableError = Exception
else:
    _AbortedError = tf.errors.AbortedError
    _OpError = tf.errors.OpError
    _OutOfRangeError = tf.errors.OutOfRangeError
    _UnavailableError = tf.errors.UnavailableError

_reduce: Any = tf.errors.OpError.__reduce__


class OutOfRangeError(errors.OutOfRangeError, _OutOfRangeError):
    """TensorFlow's error of that name, by which a session ends cleanly: raised in its place, caused
    by it.
    """

    __reduce__: Any = _reduce


class AbortedError(errors.AbortedError, _AbortedError):
    """TensorFlow's error of that name, from which a session recovers: raised in its place, caused
    by it.
    """

    __reduce__: Any = _reduce


class UnavailableError(errors.UnavailableError, _UnavailableError):
    """TensorFlow's error of that name, from which a session recovers: raised in its place, caused
    by it.
    """

    __reduce__: Any = _reduce


@contextlib.contextmanager
def _errors_of_both() -> Generator[None]:
    """Raise errors that a session knows as those of TensorFlow and of this library in one."""
    try:
        yield
    except _OpError as caught:
        error: Any = caught
        for kind in (OutOfRangeError, AbortedError, UnavailableError):
            if isinstance(caught, kind.__bases__[1]) and not isinstance(caught, kind):
                both: Any = kind(error.node_def, error.op, error.message)
                both.args = (error.message,)  # for its repr in log lines
                raise both from caught
        raise


class _Element(Node):
    """A tensor or an operation of TensorFlow, or a whole structure of fetches, which TensorFlow
    takes apart itself.
    """

    __slots__ = ("element",)

    def __init__(self, graph: Graph, name: str, element: Any) -> None:
        super().__init__(graph, name)
        self.element: Any = element

    @property
    def feed_key(self) -> Any:
        return (
            self.name if isinstance(self.element, tf.Tensor) else self.element
        )  # tensors may not be hashable


class TensorFlowGraph(Graph):
    """A `tf.Graph` as the graph of a session: its tensors, operations and variables are fetched and
    fed, as such or by name.
    """

    def __init__(self, graph: Any = None) -> None:
        """Take `graph`, a `tf.Graph`, by default the current one. A session finalizes it; after the
        session it is as it was.
        """
        super().__init__()
        self.tf_graph: Any = tf.get_default_graph() if graph is None else graph
        """The `tf.Graph`."""
        self._elements: dict[str, _Element] = {}
        if self.tf_graph.finalized:
            self.finalize()

    def node(self, key: object) -> Node:
        if isinstance(key, Node):
            return (
                self.element(tf.train.get_global_step(self.tf_graph))
                if key is self.global_step
                else super().node(key)
            )
        return self.element(key)

    def element(self, key: object) -> Node:
        """Return the node of a tensor, an operation, a variable or a name.

        `"loss"` means the tensor `"loss:0"` if the operation of that name has one output;
        `"global_step"` is the global step.

        Raises:
            FetchError: the graph does not have it, or the operation has several outputs.
        """
        try:
            found = self.tf_graph.as_graph_element(
                self._value_of(key) if isinstance(key, str) else key
            )
        except (KeyError, TypeError, ValueError) as error:
            if not isinstance(key, str) and tf.is_tensor(
                key
            ):  # a sparse or a ragged one, which has several tensors
                return _Element(self, str(key), key)
            raise FetchError(f"{key!r} is not in the graph of TensorFlow: {error}") from error
        return self._elements.setdefault(found.name, _Element(self, found.name, found))

    def _value_of(self, name: str) -> Any:
        """Return what a name means: a variable or a tensor, or an operation that has no value."""
        if (
            name == self.global_step.name
            and (step := tf.train.get_global_step(self.tf_graph)) is not None
        ):
            return step
        found = self.tf_graph.as_graph_element(name)
        outputs = () if isinstance(found, tf.Tensor) else found.outputs
        if len(outputs) > 1:
            raise FetchError(
                f"{name!r} is an operation with {len(outputs)} outputs; name one, such as"
                f" '{name}:0'"
            )
        if (
            outputs and outputs[0].dtype == tf.resource
        ):  # the handle of a variable, or of something without a value
            variables = (
                one
                for key in ("variables", "local_variables")
                for one in self.tf_graph.get_collection(key)
            )
            return next((variable for variable in variables if variable.op is found), found)
        return outputs[0] if outputs else found

    @property
    def trains(self) -> bool:
        return True

    def _released(self) -> None:
        if not self.finalized:
            self.tf_graph._unsafe_unfinalize()  # as TensorFlow's own sessions do at their end

    def _add(self, node: Any) -> Any:
        raise GraphError(
            f"{node!r} cannot be added to a graph of TensorFlow; add an operation of TensorFlow to"
            " its `tf_graph`"
        )


class _Coordinator(tf.train.Coordinator):  # type: ignore[misc]
    """TensorFlow's coordinator of one session: what its hooks and their threads ask of it is passed
    on to the library's.
    """

    def __init__(self) -> None:
        super().__init__(clean_stop_exception_types=())
        self._loop = asyncio.get_running_loop()
        self._requested = asyncio.Event()
        self._passed_on = False

    def request_stop(self, ex: Any = None) -> None:
        super().request_stop(ex)
        self._loop.call_soon_threadsafe(self._requested.set)

    async def watch(self, coord: Coordinator) -> None:
        """Stop both when one of them stops; raise the error of a thread, which ends the run or the
        session.
        """
        try:
            await coord.until(self._requested.wait())
        finally:
            super().request_stop()
        self._passed_on = True
        with _errors_of_both():
            self.raise_requested_exception()
        coord.request_stop("TensorFlow's coordinator was requested to stop")

    def end(self, grace_secs: float) -> None:
        """Wait for the threads, and raise the error of one that reached no one."""
        super().request_stop()
        try:
            self.join(stop_grace_period_secs=grace_secs, ignore_live_threads=True)
        except Exception:
            if not self._passed_on:
                raise


_READ_SECS = 0.5
"""How often the global step is read while something waits for it: as often as TensorFlow's own hook
does.
"""


class _GlobalStep(MemoryStepStore):
    """The step store of a TensorFlow graph, which reports no step of other sessions: while there
    are waits, it is read.
    """

    def __init__(self) -> None:
        super().__init__()
        self._wanted = asyncio.Event()
        self._reader: asyncio.Task[None] | None = None

    def follow(self, read_step: Callable[[], int], grace_secs: float) -> None:
        """Read the step of a session whenever it is waited for, until `unfollow`."""
        self._waits.holds = (
            True  # sessions of other processes may advance the step, and are no publishers here
        )
        self._reader = asyncio.create_task(
            self._read(read_step, grace_secs), name="reader of TensorFlow's global step"
        )

    async def unfollow(self) -> None:
        """Read no more: waits end when no publisher is left."""
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.wait([self._reader])
        self._waits.holds = False
        self._waits.fail_unreachable()

    async def take(self, step: int, known: int) -> None:
        """Follow a step that was read when `known` was the latest one: a lower one was restored,
        and is not just an old one.
        """
        await (self.reset(step) if step < known else self.raise_to(step))

    def _subscribe(self, step: int | None) -> None:
        (self._wanted.clear if step is None else self._wanted.set)()

    async def _read(self, read_step: Callable[[], int], grace_secs: float) -> None:
        while True:
            await self._wanted.wait()
            known = self.latest.step
            try:
                await self.take(await to_thread(read_step, grace_secs=grace_secs), known)
            except Exception as error:
                if isinstance(
                    error, errors.AiohooksError
                ):  # a session recovers from it, such as the end of a server
                    self._waits.abort(error)
                else:
                    self.fail(error)
                self._waits.clear_failure()  # a wait that begins later reads again
            await sleep(_READ_SECS)


class TensorFlowSession(Session):
    """The raw session over a `tf.Session`, made by `TensorFlowSessionCreator`. Its global step is
    that of the TensorFlow graph.

    It is read after each run, and while something waits for a step every half a second as well:
    other sessions of a cluster advance it. A run that is cancelled is waited for, as it cannot be
    stopped; its changes of TensorFlow's variables stay.
    """

    def __init__(
        self,
        graph: TensorFlowGraph,
        global_step: _GlobalStep,
        tf_session: Any,
        tf_coord: Any,
        read_step: Callable[[], int],
    ) -> None:
        super().__init__(graph, global_step=global_step)
        self._steps = global_step
        self._read_step = read_step
        self.tf_session: Any = tf_session
        """The `tf.Session`: what TensorFlow's hooks get."""
        self.tf_coord: Any = tf_coord
        """The `tf.train.Coordinator`: what TensorFlow's hooks get."""

    async def run(
        self,
        fetches: Any,
        feed_dict: Mapping[Any, Any] | None = None,
        *,
        options: Mapping[str, Any] | None = None,
        run_metadata: dict[str, Any] | None = None,
    ) -> Any:
        """Run what `fetches` needs and return its values in the same shape.

        Args:
            fetches: tensors, operations, variables or names, nested at will.
            feed_dict: values by tensor or name.
            options: `{"run_options": [tf.RunOptions(...)]}`; those of the hooks are merged with it
                as TensorFlow does. With `"run_metadata": [tf.RunMetadata()]` that object is filled.
            run_metadata: gets the `tf.RunMetadata` as `"run_metadata"`, if there are options.
        """
        self._check_open()
        leaves = Leaves(self.graph)
        build = leaves.build(fetches)
        feeds = canonical_feeds(self.graph, feed_dict)
        arguments: dict[str, Any] = {}
        if options is not None:
            metadata = [*options.get("run_metadata", ()), tf.RunMetadata()]
            arguments = {
                "options": _merged(options.get("run_options", ())),
                "run_metadata": metadata[0],
            }
        known = self._steps.latest.step
        values, step = await to_thread(
            self._run_in_thread, leaves.nodes, feeds, arguments, grace_secs=self.grace_secs
        )
        await self._steps.take(step, known)
        self.committed_step = step
        if run_metadata is not None:
            run_metadata.update(arguments)
        return build(values)

    @_errors_of_both()
    def _run_in_thread(
        self, nodes: Iterable[Any], feeds: Mapping[Any, Any], arguments: dict[str, Any]
    ) -> tuple[Any, int]:
        fed = {node.feed_key: value for node, value in feeds.items()}
        values = self.tf_session.run([node.element for node in nodes], fed, **arguments)
        return values, self._read_step()

    async def aclose(self) -> None:
        """Wait for the threads of TensorFlow's coordinator, at most the grace period, and close the
        `tf.Session`.
        """
        if not self.closed:
            await super().aclose()
            await self._steps.unfollow()
            await to_thread(self._close_session, grace_secs=self.grace_secs)

    def _close_session(self) -> None:
        try:
            self.tf_coord.end(self.grace_secs)
        finally:
            self.tf_session.close()


def _merged(given: Iterable[Any]) -> Any:
    """Merge `RunOptions` as TensorFlow does: of numbers the larger one is taken, flags are joined
    by "or", and lists to one.
    """
    merged = tf.RunOptions()
    for one in given:
        larger = {name: max(getattr(merged, name), getattr(one, name)) for name in _NUMBERS}
        merged.MergeFrom(one)
        for name, value in larger.items():
            setattr(merged, name, value)
    return merged


_NUMBERS = ("trace_level", "timeout_in_ms", "inter_op_thread_pool")


class TensorFlowSessionCreator:
    """Creates the raw sessions of a monitored session over a TensorFlow graph, by a session creator
    of TensorFlow.
    """

    def __init__(self, creator: Any = None, *, graph: Any = None) -> None:
        """Create no session yet.

        Args:
            creator: a `tf.train.ChiefSessionCreator`, which initialises or restores the variables,
                or another one of TensorFlow; by default a chief without checkpoints.
            graph: the `tf.Graph`, by default the current one.
        """
        self._creator = tf.train.ChiefSessionCreator() if creator is None else creator
        self.graph: TensorFlowGraph = TensorFlowGraph(graph)
        self._steps = _GlobalStep()
        self.global_step: MemoryStepStore = self._steps
        """The step store of the sessions, which follows the global step of the graph."""

    async def create_session(self) -> TensorFlowSession:
        """Create a session in a thread, restored and initialised by TensorFlow, and start its queue
        runners.
        """
        tf_coord = _Coordinator()
        tf_session, read_step, step = await to_thread(self._create, tf_coord)
        session = TensorFlowSession(self.graph, self._steps, tf_session, tf_coord, read_step)
        await self._steps.take(step, self._steps.latest.step)
        session.committed_step = step
        self._steps.follow(read_step, session.grace_secs)
        return session

    @_errors_of_both()
    def _create(self, tf_coord: _Coordinator) -> tuple[Any, Callable[[], int], int]:
        with self.graph.tf_graph.as_default():
            tf_session = self._creator.create_session()
            if tf.get_collection(tf.GraphKeys.QUEUE_RUNNERS):
                tf.train.start_queue_runners(sess=tf_session, coord=tf_coord)
            read_step = _reader_of_step(tf_session)
        return tf_session, read_step, read_step()


def _reader_of_step(tf_session: Any) -> Callable[[], int]:
    step = tf.train.get_global_step()
    read: Callable[[], Any] = (lambda: 0) if step is None else tf_session.make_callable(step)

    @_errors_of_both()
    def read_step() -> int:
        return int(read())

    return read_step


class TensorFlowHooks(BlockingHook):
    """Hooks that were written for TensorFlow (`tf.train.SessionRunHook`), unchanged, in a session
    over a TensorFlow graph.

    They are called one after the other, in the order of the list and in one thread, as TensorFlow
    does; what they get is TensorFlow's own: session, coordinator, context, options and metadata. A
    stop that one of them requests is recorded immediately, and `end` is called for all of them,
    also after one that fails. Other hooks of the session run concurrently.
    """

    def __init__(self, hooks: Iterable[Any], *, grace_secs: float = DEFAULT_GRACE_SECS) -> None:
        """Take `hooks`; a cancellation waits for a call of one at most `grace_secs`."""
        self._calls_in_order = _CallsInOrder(hooks)
        super().__init__(self._calls_in_order, grace_secs=grace_secs)

    async def after_create_session(self, session: Session, coord: Coordinator) -> None:
        if isinstance(session, TensorFlowSession):  # else `begin` has failed
            coord.start_soon(session.tf_coord.watch, coord, name="TensorFlow's coordinator")
        await self._call(
            "after_create_session", self._calls_in_order.session_created, session, coord
        )

    def __repr__(self) -> str:
        return f"TensorFlowHooks({self._calls_in_order.hooks!r})"


class _CallsInOrder:
    """The hooks of TensorFlow as one object with plain methods."""

    def __init__(self, hooks: Iterable[Any]) -> None:
        self.hooks = checked_objects(hooks, tf.train.SessionRunHook, "hooks")
        self._graph: Any = None
        self._context: Any = None
        self._asking: list[bool] = []

    def begin(self) -> None:
        self._graph = get_default_graph()
        if not isinstance(self._graph, TensorFlowGraph):
            raise InvalidHookError(
                "TensorFlowHooks are for the session of a TensorFlowSessionCreator"
            )
        for hook in self.hooks:
            self._call(hook, "begin")

    def session_created(self, session: Any, coord: Any) -> None:
        for hook in self.hooks:
            self._call(hook, "after_create_session", session.tf_session, session.tf_coord)

    def before_run(self, run_context: Any) -> SessionRunArgs:
        original, tf_session = run_context.original_args, run_context.session.tf_session
        self._context = tf.train.SessionRunContext(
            tf.train.SessionRunArgs(original.fetches, original.feed_dict), tf_session
        )
        fetches: list[Any] = []
        feeds: dict[Any, Any] = {}
        options: list[Any] = []
        self._asking = []
        for hook in self.hooks:
            args = (
                self._call(hook, "before_run", self._context, run_context=run_context)
                or SessionRunArgs()
            )
            self._asking.append(args.fetches is not None)
            if args.fetches is not None:
                fetches.append(
                    _Element(self._graph, f"the fetches of {type(hook).__name__}", args.fetches)
                )
            own = canonical_feeds(self._graph, args.feed_dict)
            if twice := [node.name for node in own if node in feeds]:
                raise FeedConflictError(
                    f"{type(hook).__name__} feeds {', '.join(twice)}, which another hook feeds as"
                    " well"
                )
            feeds.update(own)
            if args.options is not None:
                options.append(args.options)
        return SessionRunArgs(
            fetches or None, feeds or None, {"run_options": options} if options else None
        )

    def after_run(self, run_context: Any, run_values: SessionRunValues) -> None:
        ran_with = run_values.run_metadata or {
            "options": tf.RunOptions(),
            "run_metadata": tf.RunMetadata(),
        }
        results = iter(run_values.results or ())
        for hook, has_asked in zip(self.hooks, self._asking, strict=True):
            values = tf.train.SessionRunValues(next(results) if has_asked else None, **ran_with)
            self._call(hook, "after_run", self._context, values, run_context=run_context)

    def end(self, session: Any) -> None:
        failures: list[Exception] = []
        for hook in self.hooks:
            try:
                self._call(hook, "end", session.tf_session)
            except Exception as error:
                failures.append(error)
        if len(failures) > 1:
            raise ExceptionGroup("TensorFlow's hooks failed in end", failures)
        if failures:
            raise failures[0]

    def _call(
        self, hook: Any, method: str, *args: Any, run_context: SessionRunContext | None = None
    ) -> Any:
        try:
            with self._graph.tf_graph.as_default(), _errors_of_both():
                answer = getattr(hook, method)(*args)
        except BaseException as error:
            add_origin(error, f"{type(hook).__name__}.{method}")
            raise
        if run_context is not None and self._context.stop_requested:
            run_context.request_stop(f"{type(hook).__name__} has requested it")
        return answer
