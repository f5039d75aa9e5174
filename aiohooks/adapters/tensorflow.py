"""TensorFlow 1.x (`tf.compat.v1`): its graph as the graph of a session, and its hooks, unchanged.

    creator = TensorFlowSessionCreator(tf.train.ChiefSessionCreator(checkpoint_dir="checkpoints"))
    hooks = TensorFlowHooks(
        [
            tf.train.StopAtStepHook(last_step=1000),
            tf.train.LoggingTensorHook(["loss:0"], every_n_iter=100),
        ]
    )
    async with AsyncMonitoredSession(creator, [hooks, *hooks_of_this_library]) as session:
        while not session.should_stop():
            await session.run(train_op)

TensorFlow creates, restores, runs and closes its session, and calls its hooks, in worker threads.
The event loop continues meanwhile.

element       a tensor or an operation of a `tf.Graph`
queue runner  threads that TensorFlow starts to read input
raw session   the session below the monitored one: a recovery replaces it
cluster       several processes whose TensorFlow sessions share variables, such as the global step
"""

# The package has no types.
# pyright: reportUntypedBaseClass=false, reportUnknownMemberType=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false
from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from aiohooks import errors
from aiohooks._core.waits import to_thread
from aiohooks.errors import (
    FeedConflictError,
    FetchError,
    GraphError,
    InvalidArgumentError,
    InvalidHookError,
    add_origin,
    missing_extra,
    raise_failures,
    safe_repr,
)
from aiohooks.graph.graph import Graph, Node, get_default_graph
from aiohooks.graph.session import Leaves, Session, canonical_feeds
from aiohooks.hooks.blocking import BlockingHook
from aiohooks.session.coordinator import Coordinator
from aiohooks.session.hook import SessionRunArgs, SessionRunContext, SessionRunValues
from aiohooks.stores.base import MemoryStepStore

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

if TYPE_CHECKING:
    # TensorFlow's classes have no types. The classes below would be of type Any as well.
    _OutOfRangeError = Exception
    _AbortedError = Exception
    _UnavailableError = Exception
else:
    _OutOfRangeError = tf.errors.OutOfRangeError
    _AbortedError = tf.errors.AbortedError
    _UnavailableError = tf.errors.UnavailableError

# How TensorFlow's errors are pickled. Each class below has two bases, and needs that of TensorFlow.
_reduce: Any = tf.errors.OpError.__reduce__


class OutOfRangeError(errors.OutOfRangeError, _OutOfRangeError):
    """The end of the input, which ends a session cleanly.

    It replaces TensorFlow's error of the same name, which is its cause.
    """

    __reduce__: Any = _reduce


class AbortedError(errors.AbortedError, _AbortedError):
    """The loss of a run, from which a session recovers.

    It replaces TensorFlow's error of the same name, which is its cause.
    """

    __reduce__: Any = _reduce


class UnavailableError(errors.UnavailableError, _UnavailableError):
    """An unavailable service, from which a session recovers.

    It replaces TensorFlow's error of the same name, which is its cause.
    """

    __reduce__: Any = _reduce


@contextlib.contextmanager
def _errors_of_both() -> Generator[None]:
    """Replace the errors of TensorFlow that a session handles by errors of both libraries.

    Then both a session of this library and code that was written for TensorFlow catch them.
    """
    try:
        yield
    except tf.errors.OpError as error:
        for error_class in (OutOfRangeError, AbortedError, UnavailableError):
            # The second base is the class of TensorFlow.
            tensorflow_class: Any = error_class.__bases__[1]
            # These blocks are nested, so an inner one may have replaced the error already.
            if isinstance(error, tensorflow_class) and not isinstance(error, error_class):
                replacement: Any = error_class(error.node_def, error.op, error.message)
                # Log lines contain the `repr` of the error, which shows only its `args`.
                replacement.args = (error.message,)
                raise replacement from error
        raise


@dataclass(eq=False, repr=False)
class _Element(Node):
    """A tensor or operation of TensorFlow, or a structure of fetches that TensorFlow flattens."""

    element: Any

    @property
    def feed_key(self) -> Any:
        """The key of the element in a feed dict of TensorFlow."""
        # A tensor may not be hashable, so it is fed by its name.
        return self.name if isinstance(self.element, tf.Tensor) else self.element


class TensorFlowGraph(Graph):
    """A `tf.Graph` as the graph of a session.

    Fetch and feed its tensors, operations and variables as objects or by name.

    Attributes:
        tf_graph: the `tf.Graph`.
    """

    def __init__(self, graph: Any = None) -> None:
        """Create the graph of a session for the `tf.Graph` `graph`, by default the current one.

        A session finalizes the `tf.Graph`. At its end, the graph can be changed again.
        """
        super().__init__()
        self.tf_graph: Any = tf.get_default_graph() if graph is None else graph
        # The nodes by the name of their element, so that each element has only one node.
        self._elements: dict[str, _Element] = {}
        if self.tf_graph.finalized:
            self.finalize()

    def node(self, key: object) -> Node:
        """Return the node of a fetch or a feed, as `Graph.node` does for other graphs."""
        # The global step of this library stands for that of the `tf.Graph`.
        if key is self.global_step:
            return self.element(tf.train.get_global_step(self.tf_graph))
        if isinstance(key, Node):
            return super().node(key)
        return self.element(key)

    def element(self, key: object) -> Node:
        """Return the node of a tensor, an operation, a variable or a name.

        `"loss"` means the tensor `"loss:0"` if the operation of that name has one output.
        `"global_step"` is the global step.

        Raises:
            FetchError: the graph has no such element, or the operation has several outputs.
        """
        try:
            value = self._value_of(key) if isinstance(key, str) else key
            graph_element = self.tf_graph.as_graph_element(value)
        except (KeyError, TypeError, ValueError) as error:
            # TensorFlow rejects a sparse or ragged tensor here, because it consists of several
            # tensors. A run can still fetch it, because TensorFlow flattens fetches.
            if tf.is_tensor(key):
                return _Element(self, str(key), key)
            raise FetchError(f"{key!r} is not in the graph of TensorFlow: {error}") from error
        # Nodes are compared by identity, so each call must return the same node for a tensor.
        name = graph_element.name
        return self._elements.setdefault(name, _Element(self, name, graph_element))

    def _value_of(self, name: str) -> Any:
        """Return the tensor or the variable of a name, or an operation that has no value.

        The name of an operation with one output stands for the output.
        """
        if name == self.global_step.name:
            step = tf.train.get_global_step(self.tf_graph)
            if step is not None:
                return step
        named = self.tf_graph.as_graph_element(name)
        if isinstance(named, tf.Tensor) or not named.outputs:
            return named
        if len(named.outputs) > 1:
            raise FetchError(
                f"{name!r} is an operation with {len(named.outputs)} outputs; name one, such as"
                f" '{name}:0'"
            )
        [output] = named.outputs
        if output.dtype != tf.resource:
            return output
        # The output of this operation is a resource, whose value is only a handle. If it is the
        # handle of a variable, return the variable, so that a run fetches the value of that.
        for collection in ("variables", "local_variables"):
            for variable in self.tf_graph.get_collection(collection):
                if variable.op is named:
                    return variable
        return named

    @property
    def trains(self) -> bool:
        """True: this library cannot see which operations of TensorFlow advance the step."""
        return True

    def _release(self) -> None:
        """Let the graph be changed again, at the end of the last session that uses it."""
        super()._release()
        if not self.finalized:
            # TensorFlow's own sessions also call this private method at their end.
            self.tf_graph._unsafe_unfinalize()

    def _add(self, node: Any) -> Any:
        """Reject a node of this library."""
        raise GraphError(
            f"{node!r} cannot be added to a graph of TensorFlow; add an operation of TensorFlow to"
            " its `tf_graph`"
        )


class _Coordinator(tf.train.Coordinator):  # type: ignore[misc]
    """TensorFlow's coordinator of one session, connected to the coordinator of this library.

    TensorFlow's hooks and their threads request stops of this coordinator.
    """

    def __init__(self) -> None:
        super().__init__(clean_stop_exception_types=())
        self._loop = asyncio.get_running_loop()
        self._stop_was_requested = asyncio.Event()
        # Whether `watch` has raised the error of a thread, so that `end` must not raise it again.
        self._error_was_raised = False

    def request_stop(self, ex: Any = None) -> None:
        """Request a stop, in any thread. `ex` is the error of a thread, if that is the reason."""
        super().request_stop(ex)
        self._loop.call_soon_threadsafe(self._stop_was_requested.set)

    async def watch(self, coord: Coordinator) -> None:
        """Stop both coordinators when one of them stops.

        Raise the error of a thread, which ends the run or the session.
        """
        try:
            await coord.until(self._stop_was_requested.wait())
        finally:
            # Whatever has ended the wait, TensorFlow's threads must end.
            super().request_stop()
        # The flag must be set before the error leaves this method.
        self._error_was_raised = True
        with _errors_of_both():
            self.raise_requested_exception()
        coord.request_stop("TensorFlow's coordinator was requested to stop")

    def end(self, grace_secs: float) -> None:
        """Wait for the threads, and raise the error of a thread unless `watch` has raised it."""
        super().request_stop()
        try:
            self.join(stop_grace_period_secs=grace_secs, ignore_live_threads=True)
        except Exception:
            if not self._error_was_raised:
                raise


class _GraphStepStore(MemoryStepStore):
    """The step store of a TensorFlow graph, kept at the global step of the graph."""

    async def apply(self, step: int, step_before: int) -> None:
        """Set the latest step to the value of a read of TensorFlow's global step.

        The caller notes the latest step before the read as `step_before`. Meanwhile, other reads
        may raise the latest step, so `step` may be outdated.
        """
        # A step that is lower than the latest step before the read is not outdated: TensorFlow has
        # restored a checkpoint, and the step is set back.
        if step < step_before:
            await self.reset(step)
        else:
            # This does nothing if another read has raised the latest step further.
            await self.raise_to(step)


class TensorFlowSession(Session):
    """The raw session over a `tf.Session`, created by `TensorFlowSessionCreator`.

    The global step is that of the TensorFlow graph. The session reads it after each run. To wait
    for the steps of other sessions of a cluster, use TensorFlow's `GlobalStepWaiterHook`.

    TensorFlow cannot stop a run. The cancellation of a run waits until TensorFlow has finished it,
    and the changes of variables remain.

    Attributes:
        tf_session: the `tf.Session`, which TensorFlow's hooks get.
        tf_coord: the `tf.train.Coordinator`, which TensorFlow's hooks get.
    """

    def __init__(
        self,
        graph: TensorFlowGraph,
        steps: _GraphStepStore,
        tf_session: Any,
        tf_coord: Any,
        read_step: Callable[[], int],
    ) -> None:
        super().__init__(graph, global_step=steps)
        self._steps = steps
        self._read_step = read_step
        self.tf_session: Any = tf_session
        self.tf_coord: Any = tf_coord

    async def run(
        self,
        fetches: Any,
        feed_dict: Mapping[Any, Any] | None = None,
        *,
        options: Mapping[str, Any] | None = None,
        run_metadata: dict[str, Any] | None = None,
    ) -> Any:
        """Run the operations for `fetches`, and return their values in the same shape.

        Args:
            fetches: tensors, operations, variables or names, nested as you like.
            feed_dict: values by tensor or name.
            options: `{"run_options": [tf.RunOptions(...)]}`, merged with the options of the hooks
                as in TensorFlow. `"run_metadata": [tf.RunMetadata()]` gives the object to fill.
            run_metadata: a dict that gets the `tf.RunMetadata` as `"run_metadata"` if there are
                options.
        """
        self._check_open()
        leaves = Leaves(self.graph)
        build = leaves.build(fetches)
        feeds = canonical_feeds(self.graph, feed_dict)
        tf_options = _tf_options(options)
        step_before = self._steps.latest.step
        values, step = await to_thread(
            self._run_in_thread,
            leaves.nodes,
            feeds,
            tf_options,
            grace_secs=self.grace_secs,
        )
        # This run may have advanced the step, and other sessions of the cluster as well.
        await self._steps.apply(step, step_before)
        self.committed_step = step
        if run_metadata is not None:
            # `tf_options` has the `tf.RunMetadata` object, which TensorFlow has filled.
            run_metadata.update(tf_options)
        return build(values)

    @_errors_of_both()
    def _run_in_thread(
        self,
        nodes: Iterable[Any],
        feeds: Mapping[Any, Any],
        tf_options: dict[str, Any],
    ) -> tuple[Any, int]:
        """Run the operations, and return their values and the global step after them."""
        fed = {node.feed_key: value for node, value in feeds.items()}
        values = self.tf_session.run([node.element for node in nodes], fed, **tf_options)
        return values, self._read_step()

    async def aclose(self) -> None:
        """Close the `tf.Session` after its threads have ended, or after the grace period."""
        if not self.closed:
            await super().aclose()
            await to_thread(self._close_session, grace_secs=self.grace_secs)

    def _close_session(self) -> None:
        """Wait for the threads, and then close the `tf.Session` in any case."""
        try:
            self.tf_coord.end(self.grace_secs)
        finally:
            self.tf_session.close()


def _tf_options(options: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the arguments `options` and `run_metadata` of `tf.Session.run`, if there are options.

    If several hooks give a `tf.RunMetadata`, the first object is filled.
    """
    # Without options, TensorFlow fills no metadata.
    if options is None:
        return {}
    metadata = options.get("run_metadata") or [tf.RunMetadata()]
    merged = _merge_options(options.get("run_options", ()))
    return {"options": merged, "run_metadata": metadata[0]}


_NUMBER_FIELDS = ("trace_level", "timeout_in_ms", "inter_op_thread_pool")


def _merge_options(run_options: Iterable[Any]) -> Any:
    """Merge `RunOptions` as TensorFlow does.

    A number is the largest of all. A flag is set if any of them is set. Lists are joined.
    """
    merged = tf.RunOptions()
    for options in run_options:
        larger = {
            name: max(getattr(merged, name), getattr(options, name)) for name in _NUMBER_FIELDS
        }
        # `MergeFrom` joins flags and lists as wanted, but overwrites the numbers. So they are set
        # afterwards.
        merged.MergeFrom(options)
        for name, value in larger.items():
            setattr(merged, name, value)
    return merged


class TensorFlowSessionCreator:
    """Creates the raw sessions of a monitored session with a session creator of TensorFlow.

    Attributes:
        graph: the graph of the sessions.
        global_step: the step store of the sessions, which follows the global step of the graph.
    """

    def __init__(
        self,
        creator: Any = None,
        *,
        graph: Any = None,
    ) -> None:
        """Store the creator. `create_session` creates the sessions.

        Args:
            creator: a `tf.train.ChiefSessionCreator`, which initializes or restores the variables,
                or another creator of TensorFlow. The default is a chief without checkpoints.
            graph: the `tf.Graph`, by default the current graph.
        """
        self._creator = tf.train.ChiefSessionCreator() if creator is None else creator
        self.graph: TensorFlowGraph = TensorFlowGraph(graph)
        self._steps = _GraphStepStore()
        self.global_step: MemoryStepStore = self._steps

    async def create_session(self) -> TensorFlowSession:
        """Create a raw session over a new `tf.Session`.

        In a thread, TensorFlow initializes or restores its session and starts its queue runners.
        """
        tf_coord = _Coordinator()
        tf_session, read_step, step = await to_thread(
            self._create_in_thread,
            tf_coord,
        )
        session = TensorFlowSession(
            self.graph,
            self._steps,
            tf_session,
            tf_coord,
            read_step,
        )
        # The store has the latest step of the session before. A restored step may be lower.
        await self._steps.apply(step, self._steps.latest.step)
        session.committed_step = step
        return session

    @_errors_of_both()
    def _create_in_thread(self, tf_coord: _Coordinator) -> tuple[Any, Callable[[], int], int]:
        """Return a new `tf.Session`, a function that reads its global step, and this step."""
        with self.graph.tf_graph.as_default():
            tf_session = self._creator.create_session()
            if tf.get_collection(tf.GraphKeys.QUEUE_RUNNERS):
                tf.train.start_queue_runners(sess=tf_session, coord=tf_coord)
            read_step = _make_step_reader(tf_session)
        return tf_session, read_step, read_step()


def _make_step_reader(tf_session: Any) -> Callable[[], int]:
    """Return a function that reads the global step. Without a global step, it returns 0."""
    step = tf.train.get_global_step()
    if step is None:
        return lambda: 0
    # The step is read after each run, and a callable of TensorFlow is faster than `run`.
    read_value = tf_session.make_callable(step)

    @_errors_of_both()
    def read_step() -> int:
        return int(read_value())

    return read_step


class TensorFlowHooks(BlockingHook):
    """Hooks that were written for TensorFlow (`tf.train.SessionRunHook`), unchanged.

    The hooks need a session over a TensorFlow graph. They get TensorFlow's own session,
    coordinator, context, options and metadata. As in TensorFlow, a thread calls the hooks one after
    another in the order of the list. Other hooks of the session run concurrently.

    A stop that a hook requests is recorded immediately. `end` is called for all hooks, even if the
    `end` of a hook fails.
    """

    def __init__(self, hooks: Iterable[Any]) -> None:
        """Wrap `hooks`. A cancellation waits for a call of a hook, at most for 10 s."""
        self._calls_in_order = _CallsInOrder(hooks)
        super().__init__(self._calls_in_order)

    async def after_create_session(self, session: Session, coord: Coordinator) -> None:
        """Connect both coordinators, and call `after_create_session` of the hooks."""
        # `_CallsInOrder.begin` rejects the graph of any other session.
        if isinstance(session, TensorFlowSession):
            coord.start_soon(session.tf_coord.watch, coord, name="TensorFlow's coordinator")
        await self._call(
            "after_create_session",
            self._calls_in_order.session_created,
            session,
            coord,
        )

    def __repr__(self) -> str:
        return f"TensorFlowHooks({self._calls_in_order.hooks!r})"


class _CallsInOrder:
    """Combines the hooks of TensorFlow into one object with plain methods for `BlockingHook`."""

    def __init__(self, hooks: Iterable[Any]) -> None:
        self.hooks = _checked_hooks(hooks)
        # The graph of the session, set in `begin`.
        self._graph: Any = None
        # TensorFlow's context of the current run, set in `before_run`.
        self._context: Any = None

    def begin(self) -> None:
        """Keep the graph of the session, and call `begin` of each hook."""
        self._graph = get_default_graph()
        if not isinstance(self._graph, TensorFlowGraph):
            raise InvalidHookError(
                "TensorFlowHooks are for the session of a TensorFlowSessionCreator"
            )
        for hook in self.hooks:
            self._call(hook, "begin")

    def session_created(self, session: Any, coord: Any) -> None:
        """Call `after_create_session` of each hook, with the session and coordinator of TensorFlow.

        The name differs, because `TensorFlowHooks` calls this in an override of that method.
        """
        for hook in self.hooks:
            self._call(
                hook,
                "after_create_session",
                session.tf_session,
                session.tf_coord,
            )

    def before_run(self, run_context: Any) -> SessionRunArgs:
        """Call `before_run` of each hook, and return the combined request of all hooks.

        Its fetches are a dict by the number of the hook, so that `after_run` can give each hook its
        own values. The options of all hooks are in a list, which `TensorFlowSession.run` merges.
        """
        original = run_context.original_args
        self._context = tf.train.SessionRunContext(
            tf.train.SessionRunArgs(original.fetches, original.feed_dict),
            run_context.session.tf_session,
        )
        fetches: dict[int, Any] = {}
        feeds: dict[Any, Any] = {}
        options: list[Any] = []
        for number, hook in enumerate(self.hooks):
            args = self._call_in_run(run_context, hook, "before_run") or SessionRunArgs()
            name = type(hook).__name__
            if args.fetches is not None:
                fetches[number] = _Element(self._graph, f"the fetches of {name}", args.fetches)
            own_feeds = canonical_feeds(self._graph, args.feed_dict)
            conflicts = [node.name for node in own_feeds if node in feeds]
            if conflicts:
                raise FeedConflictError(
                    f"{name} feeds {', '.join(conflicts)}, which another hook feeds as well"
                )
            feeds.update(own_feeds)
            if args.options is not None:
                options.append(args.options)
        run_options = {"run_options": options} if options else None
        return SessionRunArgs(fetches or None, feeds or None, run_options)

    def after_run(self, run_context: Any, run_values: SessionRunValues) -> None:
        """Call `after_run` of each hook with the values of its own fetches."""
        # TensorFlow's hooks expect both arguments, even after a run without options.
        options_and_metadata = run_values.run_metadata or {
            "options": tf.RunOptions(),
            "run_metadata": tf.RunMetadata(),
        }
        results = run_values.results or {}
        for number, hook in enumerate(self.hooks):
            values = tf.train.SessionRunValues(results.get(number), **options_and_metadata)
            self._call_in_run(
                run_context,
                hook,
                "after_run",
                values,
            )

    def end(self, session: Any) -> None:
        """Call `end` of every hook, also after one has failed, and raise the errors at the end."""
        failures: list[BaseException] = []
        for hook in self.hooks:
            try:
                self._call(hook, "end", session.tf_session)
            except Exception as error:
                failures.append(error)
        raise_failures(failures, "hooks of TensorFlow failed in end")

    def _call_in_run(
        self,
        run_context: SessionRunContext,
        hook: Any,
        method: str,
        *args: Any,
    ) -> Any:
        """Call a method with TensorFlow's context, and pass on a stop that the hook requests."""
        result = self._call(
            hook,
            method,
            self._context,
            *args,
        )
        if self._context.stop_requested:
            run_context.request_stop(f"{type(hook).__name__} has requested it")
        return result

    def _call(
        self,
        hook: Any,
        method: str,
        *args: Any,
    ) -> Any:
        """Call a method of a hook in the `tf.Graph`, and add its name to an error."""
        try:
            with self._graph.tf_graph.as_default(), _errors_of_both():
                return getattr(hook, method)(*args)
        except BaseException as error:
            add_origin(error, f"{type(hook).__name__}.{method}")
            raise


def _checked_hooks(hooks: object) -> list[Any]:
    """Return the hooks as a list. Raise unless all are hooks of TensorFlow."""
    # A hook alone is rejected with the same message as other objects that are no list.
    checked: list[Any] = [hooks]
    if isinstance(hooks, Iterable):
        checked = [*hooks]  # pyright: ignore[reportUnknownArgumentType]
    for hook in checked:
        if not isinstance(hook, tf.train.SessionRunHook):
            raise InvalidArgumentError(
                f"hooks has {safe_repr(hook)}; give a list of objects of SessionRunHook of"
                " tensorflow"
            )
    return checked
