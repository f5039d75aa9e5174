"""The exit code of a process after signals, and the signal handlers of its children; each test
starts processes.
"""

from __future__ import annotations

import signal
import sys
import textwrap
from pathlib import Path

import pytest

from tests.conformance.report import installed_loops
from tests.support import processes
from tests.support.waiting import HANG_SECS

pytestmark = [
    pytest.mark.every_python,
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform == "win32", reason="signals of Unix"),
]

TERM, INT = signal.SIGTERM, signal.SIGINT
LOOPS = installed_loops()

WAITS = """
    import sys
    import aiohooks as ah

    class Hook(ah.SessionRunHook):
        async def begin(self):
            print("ready", flush=True)

    async def main(creator, url):
        async with ah.open_step_store(url, run="r") as store:
            if creator is ah.ChiefSessionCreator:
                opened = ah.AsyncMonitoredSession(creator(ah.Graph(), global_step=store))
                first = await opened.__aenter__()
            async with ah.open_step_store(url, run="r") as other:
                source = creator(ah.Graph(), global_step=other)
                async with ah.AsyncMonitoredSession(source, [Hook()], handle_signals=True):
                    print("open", flush=True)

    ah.run(main, getattr(ah, sys.argv[1]), sys.argv[2])
"""


@pytest.mark.sample
@pytest.mark.parametrize("creator", ["WorkerSessionCreator", "ChiefSessionCreator"])
def test_a_signal_while_a_session_waits_for_another_one(creator: str, tmp_path: Path) -> None:
    """A worker that waits for its chief, and a chief that waits for the lead, end at the first
    signal, with its exit code.
    """
    command = [sys.executable, "-c", textwrap.dedent(WAITS), creator, f"local://{tmp_path}"]
    code, output, _ = send_signals(command, TERM)
    assert (code, output) == (128 + TERM, "")


HANGS = """
    import asyncio, logging
    import aiohooks as ah

    class Handler(logging.Handler):
        def emit(self, record):
            text = record.getMessage()
            print("ready" if "a caller has waited 1" in text else text, flush=True)

    class Hangs(ah.SessionRunHook):
        async def after_run(self, run_context, run_values):
            await asyncio.Event().wait()

    async def step():
        pass

    async def main():
        logging.getLogger("aiohooks").addHandler(Handler())
        hooks = [ah.configure(Hangs(), background=True, max_pending=2)]
        options = {"handle_signals": True, "stop_grace_period_secs": 0.1}
        async with ah.AsyncMonitoredSession(step, hooks, **options) as session:
            async for _ in session.steps():
                pass

    ah.run(main)
"""


def test_a_signal_while_a_step_waits_for_a_hook_that_hangs() -> None:
    """The queue of a background hook is full, and its only call hangs: that is logged. The first
    signal ends the program, and the calls that are dropped are logged.
    """
    code, output, _ = send_signals([sys.executable, "-c", textwrap.dedent(HANGS)], TERM)
    assert code == 128 + TERM
    # On a busy machine, the cancelled call may outlast its grace period. That is logged as well.
    assert output.startswith("3 background calls of Hangs are left, and are dropped")


def send_signals(command: list[str], *numbers: signal.Signals) -> tuple[int, str, str]:
    """Send signals to a program once it is ready, and return its exit code, output and errors."""
    with processes.start(command) as process:
        assert process.stdout is not None
        try:
            for number in numbers:
                assert process.stdout.readline() == "ready\n"
                process.send_signal(number)
            output, errors = process.communicate(timeout=HANG_SECS)
        except BaseException:
            process.kill()
            raise
    return process.returncode, output.replace("\n", " ").strip(), errors


ENDS = """
    import asyncio, logging, signal
    import aiohooks as ah
    from aiohooks.session import run as run_module

    logging.disable()  # the runner cancels tasks of the library as well, which logs that

    class Hook(ah.SessionRunHook):
        async def close(self, exc):
            await asyncio.sleep(0.01)
            print("closed", flush=True)

    async def step():
        pass

    async def other():
        async with ah.AsyncMonitoredSession(step, [Hook()]) as session:
            await session.until(asyncio.Event().wait())

    async def main():
        global task
        task = asyncio.create_task(other())
        try:
            async with ah.AsyncMonitoredSession(step, handle_signals=HANDLED):
                await asyncio.sleep(0.01)
                signal.raise_signal(signal.SIGINT)
                await asyncio.sleep(0)
        finally:
            asyncio.get_running_loop().call_soon(signal.raise_signal, signal.SIGINT)

    if LOOP == "asyncio":
        run_module._new_event_loop = asyncio.new_event_loop
    ah.run(main)
"""


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("handled", [True, False])
def test_an_interrupt_while_main_ends(handled: bool, loop: str) -> None:
    """It is the last one of several, in a callback: the sessions of other tasks are closed, and the
    exit is that of a Ctrl-C.
    """
    source = textwrap.dedent(ENDS).replace("HANDLED", str(handled)).replace("LOOP", repr(loop))
    code, output, errors = send_signals([sys.executable, "-c", source])
    assert (code, output) == (128 + INT if handled else -INT, "closed")
    assert errors == "" if handled else errors.rstrip().endswith("KeyboardInterrupt")


FORKS = """
    import asyncio, multiprocessing, os, signal, sys, warnings
    import aiohooks as ah

    warnings.simplefilter("ignore", DeprecationWarning)  # forking beside threads

    async def step():
        pass

    def child(connection, ended_by):
        numbers = (signal.SIGINT, signal.SIGTERM)
        defaults = [signal.getsignal(number) is signal.SIG_DFL for number in numbers]
        connection.send((defaults, signal.set_wakeup_fd(-1)))
        if ended_by == "a session":
            async def main():
                async with ah.AsyncMonitoredSession(step, handle_signals=True) as session:
                    os.kill(os.getpid(), signal.SIGTERM)
                    await session.coord.wait_for_stop()
                connection.send(session.stop_reason)
            with asyncio.Runner() as runner:  # a new loop
                asyncio._set_running_loop(None)
                runner.run(main())
            os._exit(5)
        signal.pause()

    async def main():
        context = multiprocessing.get_context("fork")
        async with ah.AsyncMonitoredSession(step, handle_signals=True) as session:
            for ended_by in ("a signal", "a session"):
                ours, theirs = context.Pipe()
                process = context.Process(target=child, args=(theirs, ended_by))
                process.start()
                print(*ours.recv())
                if ended_by == "a signal":
                    os.kill(process.pid, signal.SIGTERM)
                else:
                    print(ours.recv())
                await asyncio.to_thread(process.join)
                print(process.exitcode, session.should_stop())
            os.kill(os.getpid(), signal.SIGTERM)
            await session.coord.wait_for_stop()
            print(session.stop_reason)

    ah.run(main)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
def test_forked_children_have_default_handlers() -> None:
    """A child that multiprocessing forks has the default handlers and no wakeup fd, and may open
    sessions of its own.
    """
    command = [sys.executable, "-c", textwrap.dedent(FORKS)]
    with processes.start(command) as process:
        output, errors = process.communicate(timeout=HANG_SECS)
    assert output.splitlines() == [
        "[True, True] -1",
        "-15 False",
        "[True, True] -1",
        "SIGTERM received",
        "5 False",
        "SIGTERM received",
    ], errors
    assert process.returncode == 143
