"""The launchers of one machine: tasks of one loop, and processes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import threading
import types
from collections.abc import AsyncIterator
from multiprocessing import resource_tracker
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any

import pytest

from aiohooks import Backoff
from aiohooks.distributed import Task, local
from aiohooks.distributed.local import run_processes, run_tasks
from aiohooks.distributed.task import TaskResult, make_spec, supervise, with_process_options
from aiohooks.errors import InvalidArgumentError, PublisherFinishedError, TaskDiedError
from aiohooks.stores import MemoryStepStore
from tests.support import tasks as distributed_tasks
from tests.support.source import ROOT
from tests.support.waiting import HANG_SECS, cancel_and_wait, parked, ticks


@pytest.fixture(autouse=True, scope="module")
def _tracker() -> None:
    # A process of Python's own that starts with the first child and stays as long as this process.
    resource_tracker.ensure_running()


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restart tasks immediately."""
    monkeypatch.setattr("aiohooks.distributed.task._BACKOFF", Backoff(initial_secs=0))


async def test_tasks_of_one_loop() -> None:
    """All tasks share one store; the results are in order, the chief's first."""
    found = await run_tasks(
        distributed_tasks.about, num_workers=2, run="one loop", checkpoint_dir=ROOT / "c"
    )
    assert [task["task_id"] for task in found] == [0, 1, 2]
    assert [task["is_chief"] for task in found] == [True, False, False]
    assert [task["name"] for task in found] == ["chief", "worker 1", "worker 2"]
    assert {task["step"] for task in found} == {1, 2, 3}
    assert all(
        task["run"] == "one loop" and task["checkpoint_dir"] == ROOT / "c" and task["attempt"] == 1
        for task in found
    )


async def test_one_task_fails() -> None:
    """The error of one task is raised, and the others are cancelled."""
    with pytest.raises(ExceptionGroup, match="1 of 4 tasks failed") as caught:
        await run_tasks(distributed_tasks.fails)
    assert [str(error) for error in caught.value.exceptions] == ["the data are bad"]


async def test_cancelling_the_launcher_cancels_the_tasks() -> None:
    """When the launcher was cancelled, no task is left."""
    ended: list[int] = []

    async def main(task: Task) -> None:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            ended.append(task.task_id)

    launcher = await parked(run_tasks(main), 3)
    assert await cancel_and_wait(launcher)
    assert ended == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("successor", "result"),
    [
        ("leads already", 1),
        ("leads later", 2),
        ("finishes", 1),
        ("never leads", 1),
        ("comes later", 1),
    ],
)
async def test_a_worker_that_ends_while_the_chief_is_dead(successor: str, result: int) -> None:
    """It is restarted, as the next chief goes back to a checkpoint; if that one has finished
    meanwhile, it has ended before.
    """
    worker_ended = asyncio.Event()
    chief_died = asyncio.Event()
    led = asyncio.Event()

    async def worker(attempt: int) -> int:
        if attempt == 1:
            await (ticks(1) if successor == "comes later" else chief_died.wait())
            await ticks(20)
            worker_ended.set()
        else:
            await led.wait()
            if successor == "finishes":
                raise PublisherFinishedError("chief finished at step 7")
        return attempt

    async def chief(attempt: int) -> int:
        if successor == "comes later" or (attempt == 2 and successor != "leads already"):
            await worker_ended.wait()
            await ticks(20)
        async with store.lead() if successor != "never leads" else contextlib.nullcontext():
            if attempt == 1:
                chief_died.set()
                raise TaskDiedError("the chief died", task_id=0)
            led.set()
            await worker_ended.wait()
        return attempt

    spec = with_process_options(make_spec(_no_task, (), 1, None, None), 1, 1.0, None)
    async with MemoryStepStore() as store:
        found = await supervise(
            lambda spec: worker(spec.attempt) if spec.task_id else chief(spec.attempt),
            distributed_tasks.SpecOfStore.of(spec, store),
        )
    assert found == [2, result]


async def _no_task(task: Task) -> None: ...


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_workers": -1}, "num_workers is -1; give a whole number"),
        ({"num_workers": 1.5}, "num_workers is 1.5"),
        ({"max_restarts": True}, "max_restarts is True"),
        ({"stop_grace_secs": -1}, "stop_grace_secs is -1"),
        ({"store": "memory://"}, "store='memory://' is for one process"),
        ({"store": "redsi://h"}, "unknown kind of step store 'redsi'; did you mean 'redis'"),
        ({"store": 7}, "url is 7; give"),
        ({"store_options": {"on_last": "keep"}}, "no option 'on_last'; did you mean 'on_lost'"),
        ({"store_options": []}, "store_options is \\[\\]"),
        ({"run": ""}, "run='': give a printable name"),
        ({"args": "x"}, "args is 'x'; give a tuple"),
        ({"checkpoint_dir": 3}, "checkpoint_dir is 3; give the path"),
        (
            {"checkpoint_dir": "s3://bucket/run"},
            "checkpoint_dir is 's3://bucket/run'; give the path",
        ),
        (
            {"args": (1, 2)},
            (
                "main is <function _no_task.*, which is called with the Task and the arguments .1,"
                " 2.: too many"
            ),
        ),
    ],
)
async def test_bad_options(options: dict[str, Any], message: str) -> None:
    """Invalid options are refused before anything is started."""
    with pytest.raises(InvalidArgumentError, match=message):
        await run_processes(_no_task, **options)


async def test_bad_mains() -> None:
    """`main` must be a coroutine function, and one that another process can import."""
    with pytest.raises(InvalidArgumentError, match="give a coroutine function"):
        await run_tasks(print)  # type: ignore[arg-type]

    async def main(task: Task) -> None: ...

    with pytest.raises(ExceptionGroup) as caught:
        await run_processes(main, num_workers=0)
    assert isinstance(caught.value.exceptions[0], InvalidArgumentError)


needs_pidfd = pytest.mark.skipif(
    not hasattr(os, "pidfd_open"), reason="needs os.pidfd_open of Linux"
)


def marked(test: Any) -> Any:
    """Mark a slow test for which one loop is enough."""
    return pytest.mark.slow(pytest.mark.asyncio(loop_factories=["asyncio"])(test))


@pytest.mark.slow
async def test_processes(tmp_path: Path) -> None:
    """Each task has its own process and store, and its result is returned."""
    store = f"local://{tmp_path}"
    found = await run_processes(
        distributed_tasks.about, num_workers=2, store=store, run="three", checkpoint_dir=tmp_path
    )
    assert [task["task_id"] for task in found] == [0, 1, 2]
    assert len({task["pid"] for task in found} | {os.getpid()}) == 4
    assert {task["step"] for task in found} == {1, 2, 3}
    assert all(
        task["run"] == "three" and task["checkpoint_dir"] == tmp_path and task["attempt"] == 1
        for task in found
    )


@marked
async def test_the_run_of_processes(tmp_path: Path) -> None:
    """`open_step_store()` opens it. With a random name it is deleted, with another it stays. The
    asyncio tasks have names.
    """
    store = f"local://{tmp_path}"
    assert await run_processes(distributed_tasks.finds_the_run, num_workers=0) == ["LocalEngine"]
    assert await run_processes(distributed_tasks.returns_its_name, num_workers=1, store=store) == [
        "chief",
        "worker 1",
    ]
    assert os.listdir(tmp_path) == []
    await run_processes(
        distributed_tasks.returns_its_name, num_workers=0, store=store, run="digits"
    )
    assert os.listdir(tmp_path) == ["digits"]


@marked
async def test_store_options_may_be_any_mapping() -> None:
    """The launcher copies them: not every mapping can be sent to another process."""
    options = types.MappingProxyType({"on_lost": "raise"})
    found = await run_processes(
        distributed_tasks.returns_its_name, num_workers=1, store_options=options
    )
    assert found == ["chief", "worker 1"]


@marked
@pytest.mark.parametrize(
    ("how", "message", "code"),
    [
        ("kill", "was killed by SIGKILL", -9),
        ("exit", "ended with exit code 3", 3),
        ("end before main does", "ended with exit code 0, before main had ended", 0),
    ],
)
async def test_a_process_that_dies(how: str, message: str, code: int) -> None:
    """It is restarted with the next attempt, and the others continue. If it dies too often the
    error names all of that.
    """
    options: dict[str, Any] = {"num_workers": 1}
    assert await run_processes(distributed_tasks.dies, args=(how, 2), **options) == [1, 3]
    with pytest.raises(ExceptionGroup, match="1 of 2 tasks failed") as caught:
        await run_processes(distributed_tasks.dies, args=(how, 9), max_restarts=1, **options)
    (error,) = caught.value.exceptions
    assert isinstance(error, TaskDiedError)
    assert (error.task_id, error.exit_code) == (1, code)
    assert "worker 1" in str(error)
    assert f"attempt 2) {message}" in str(error)
    assert error.__notes__ == ["not restarted again after 1 restarts"]


@pytest.mark.slow
async def test_a_process_that_fails() -> None:
    """The error of `main` is raised with its traceback, and the others are ended; so is a result
    that cannot be pickled.
    """
    with pytest.raises(ExceptionGroup, match="1 of 3 tasks failed") as caught:
        await run_processes(distributed_tasks.fails, num_workers=2)
    (error,) = caught.value.exceptions
    assert isinstance(error, ValueError)
    assert "in the worker 1, attempt 1" in error.__notes__[0]
    assert "tasks.py" in error.__notes__[0]
    with pytest.raises(ExceptionGroup) as caught:
        await run_processes(distributed_tasks.returns_a_lock, num_workers=0)
    assert "the result of main cannot be sent" in str(caught.value.exceptions[0])


@contextlib.asynccontextmanager
async def pids_of(path: Path, count: int) -> AsyncIterator[asyncio.Future[list[int]]]:
    """Yield a future of the ids of `count` processes that write them into a named pipe."""
    os.mkfifo(path)
    pipe = os.open(path, os.O_RDWR | os.O_NONBLOCK)
    pids: asyncio.Future[list[int]] = asyncio.get_running_loop().create_future()
    text = b""

    def read() -> None:
        nonlocal text
        text += os.read(pipe, 1000)
        if text.count(b"\n") == count:
            pids.set_result([int(line) for line in text.split()])

    asyncio.get_running_loop().add_reader(pipe, read)
    try:
        yield pids
    finally:
        asyncio.get_running_loop().remove_reader(pipe)
        os.close(pipe)


async def wait_ended(pid: int) -> None:
    """Wait for the end of a process that need not be a child of this one."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().add_reader(process, lambda: ended.done() or ended.set_result(None))
    try:
        await ended
    finally:
        asyncio.get_running_loop().remove_reader(process)
        os.close(process)


LAUNCHER = """
import asyncio, os, signal, sys, threading
from aiohooks.distributed.local import run_processes
from tests.support.tasks import writes_its_pid

def fork():
    sys.stdin.readline()
    if os.fork() == 0:
        print("forked", flush=True)
        while True:
            signal.pause()

async def main():
    threading.Thread(target=fork, daemon=True).start()
    await run_processes(writes_its_pid, num_workers=1, args=(sys.argv[1],), stop_grace_secs=2.0)

if __name__ == "__main__":
    asyncio.run(main())
"""


@contextlib.asynccontextmanager
async def launched(tmp_path: Path) -> AsyncIterator[tuple[Popen[bytes], list[int]]]:
    """Start a program that starts a chief and a worker; yield it and the ids of their processes."""
    script = tmp_path / "launcher.py"
    script.write_text(LAUNCHER)
    (tmp_path / "temporary").mkdir()
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path / "temporary")}
    env.pop("XDG_RUNTIME_DIR", None)
    async with pids_of(tmp_path / "pipe", 2) as pids_written:
        command = [sys.executable, str(script), str(tmp_path / "pipe")]
        options: dict[str, Any] = {"env": env, "stdin": PIPE, "stdout": PIPE}
        with Popen(command, start_new_session=True, **options) as launcher:  # noqa: ASYNC220
            try:
                yield launcher, await pids_written
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(launcher.pid, signal.SIGKILL)


@pytest.mark.sample
@marked
@needs_pidfd
@pytest.mark.parametrize("end", ["SIGKILL", "SIGKILL of one that has forked", "SIGTERM"])
async def test_the_processes_end_with_their_launcher(tmp_path: Path, end: str) -> None:
    """However it ends, also where a process that it has forked has its open files; a launcher that
    is not killed deletes its run.
    """
    runs = tmp_path / "temporary" / f"aiohooks-{os.getuid()}"
    async with launched(tmp_path) as (launcher, pids):
        assert len([*runs.glob("run-*")]) == 1
        if "forked" in end:
            assert launcher.stdin is not None
            assert launcher.stdout is not None
            launcher.stdin.write(b"fork\n")
            launcher.stdin.flush()
            assert await asyncio.to_thread(launcher.stdout.readline) == b"forked\n"
        launcher.send_signal(signal.SIGTERM if end == "SIGTERM" else signal.SIGKILL)
        for pid in pids:
            await wait_ended(pid)
        if end == "SIGTERM":
            assert await asyncio.to_thread(launcher.wait) == 128 + signal.SIGTERM
            assert [*runs.glob("run-*")] == []


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (-9, "was killed by SIGKILL"),
        (-70, "was killed by signal 70"),
        (3, "ended with exit code 3"),
        (0, "ended with exit code 0, before main had ended"),
        (None, "ended with exit code None, before main had ended"),
    ],
)
def test_the_cause_of_a_death(code: int | None, text: str) -> None:
    """A signal by its name, or the exit code."""
    assert local._describe_exit(code) == text


@pytest.mark.parametrize(
    ("parts", "result"),
    [(["whole"], b"whole"), (["in ", "two"], b"in two"), (["half"], None), ([], None)],
)
async def test_a_result_is_whole_or_none(parts: list[str], result: bytes | None) -> None:
    """It has the length that was announced, also if the connection is still open; at its end what
    is less is none.
    """
    reader = asyncio.StreamReader()
    receiving = asyncio.ensure_future(local._receive_result(reader))
    if parts:
        reader.feed_data(local._LENGTH.pack(5 if parts == ["half"] else len("".join(parts))))
    for part in parts:
        await ticks(3)
        reader.feed_data(part.encode())
    if result is None:
        reader.feed_eof()
    assert await receiving == result


def test_the_view_of_what_is_sent_is_released(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error refers to the frame that sends it, and Python 3.13 complains when it collects that
    with a view.
    """
    views: list[memoryview] = []

    class Pickler:
        @staticmethod
        def dumps(result: object) -> memoryview:
            views.append(memoryview(b"a result"))
            return views[-1]

    monkeypatch.setattr(local, "ForkingPickler", Pickler)
    receiver, sender = socket.socketpair()
    with receiver, sender:
        local._send_result(sender, TaskResult(7))
        assert receiver.recv(100).endswith(b"a result")
    with pytest.raises(ValueError, match="released"):
        len(views[0])


@marked
async def test_a_helper_does_not_hide_a_death() -> None:
    """A process that dies is noticed although processes that it has forked or started are left."""
    with pytest.raises(ExceptionGroup) as caught:
        await run_processes(distributed_tasks.dies_with_helpers, num_workers=0, max_restarts=0)
    (error,) = caught.value.exceptions
    assert "was killed by SIGKILL" in str(error)


class _StopsAtItsStart:
    """An argument of a task that is pickled when the process starts, and then waits."""

    def __init__(self) -> None:
        self.starting = asyncio.Event()
        self.cancelled = threading.Event()
        self._loop = asyncio.get_running_loop()

    def __reduce__(self) -> tuple[type[int], tuple[()]]:
        self._loop.call_soon_threadsafe(self.starting.set)
        assert self.cancelled.wait(HANG_SECS)
        return int, ()


@marked
async def test_a_launcher_that_is_cancelled_while_a_process_starts_ends() -> None:
    """It does not wait for the grace period, which is longer than the limit of this test."""
    argument = _StopsAtItsStart()
    launcher = asyncio.ensure_future(
        run_processes(
            distributed_tasks.waits_forever,
            args=(argument,),
            num_workers=0,
            stop_grace_secs=10 * HANG_SECS,
        )
    )
    await argument.starting.wait()
    launcher.cancel()
    argument.cancelled.set()
    await asyncio.wait([launcher])
    assert launcher.cancelled()


@pytest.mark.parametrize("closed", ["none", "own_end", "other_end"])
def test_a_forked_child_closes_both_ends(closed: str) -> None:
    """Also where the launcher has closed one of them already."""
    connection = local._Connection()
    if closed != "none":
        getattr(connection, closed).close()
    connection.after_fork()
    assert (connection.own_end.fileno(), connection.other_end.fileno()) == (-1, -1)
