"""Run the tests of many faults in one process of pytest, inside a copy of the tree.

    python -m tests.fuzz.mutants.trials JOB RESULTS

The tests are imported and collected once. Each fault is then put in place in a fork of that
process, which runs the tests that enter the changed function until one of them fails: those of the
module's own files first, of these the ones that reach the changed lines, and of these the quickest.
Tests that start processes or set a trace function of their own come last: it is not known what
these reach.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import resource
import select
import signal
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import coverage
import pytest

from tests.fuzz.mutants.changes import Mutant

_SLOWEST_TEST_SECS = 300.0  # without a fault, on a busy machine
# A fault that takes all memory counts as found, and so does one that hangs.
MEMORY = 4 * 1024**3
CO_ITERABLE_COROUTINE = 0x100

Reached = dict[str, dict[int, list[str]]]
"""For each module, the tests that run each of its lines."""


class Trials:
    """The plugin that runs faults in place of the tests."""

    def __init__(
        self, faults: list[Mutant], results: int, hang_secs: float, *, every_test: bool
    ) -> None:
        self.faults = faults
        self.results = results
        self.hang_secs = hang_secs
        self.every_test = every_test
        """Whether all tests of a fault are run, also after the first that fails."""
        self.root = Path.cwd()
        self.secs: dict[str, float] = {}
        """How long each test takes that passes without a fault."""
        self.unmeasured: set[str] = set()
        """The tests that start processes or trace."""

    def pytest_configure(self) -> None:
        import hypothesis  # not before pytest, which rewrites a part of it

        phases = [
            hypothesis.Phase.explicit,
            hypothesis.Phase.generate,
        ]  # without making failures smaller
        hypothesis.settings.register_profile(
            "mutants", database=None, derandomize=True, phases=phases
        )
        hypothesis.settings.load_profile("mutants")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        if session.testsfailed:
            raise session.Interrupted("not all tests can be imported")
        functions = _library_functions(self.root)
        gc.collect()
        gc.freeze()  # shared with the forks, and not looked at by their garbage collections
        reached: Reached = {}
        with _forked(lambda out: self._measure(session, out), _SLOWEST_TEST_SECS) as lines:
            for line in lines:
                match json.loads(line):
                    case [test, secs, is_unmeasured]:
                        self.secs[test] = secs
                        self.unmeasured |= {test} if is_unmeasured else set()
                    case of_module:
                        reached |= of_module
        for number, fault in enumerate(self.faults):
            self._report(
                number,
                *self._tried(session, number, fault, reached.get(fault.module, {}), functions),
            )
        return True

    def _report(self, number: int, fate: str, test: str) -> None:
        _write(self.results, [number, fate, test])

    def _measure(self, session: pytest.Session, out: int) -> None:
        """Run all tests once, without a fault; those that fail are left out."""
        modules = sorted({fault.module for fault in self.faults})
        measured = coverage.Coverage(data_file=None, include=modules, config_file=False)
        measured.start()
        failed: set[str] = set()
        start = unmeasured = 0.0

        def started(test: str) -> None:
            nonlocal start, unmeasured
            measured.switch_context(test)
            start, unmeasured = time.monotonic(), 0

        def count_unmeasured(event: str, args: object) -> None:
            nonlocal unmeasured
            in_main = (
                threading.current_thread() is threading.main_thread()
            )  # `coverage` traces the others itself
            unmeasured += event in ("os.fork", "subprocess.Popen") or (
                event == "sys.settrace" and in_main
            )

        sys.addaudithook(count_unmeasured)
        for test, passed in _run(session, session.items, started):
            if passed:
                _write(out, [test, time.monotonic() - start, unmeasured > 0])
            else:
                failed.add(test)
        measured.stop()
        data = measured.get_data()
        for module in modules:
            contexts = data.contexts_by_lineno(str(self.root / module))
            lines = {line: sorted(set(tests) - failed - {""}) for line, tests in contexts.items()}
            _write(out, {module: lines})
        self._report(-1, "failed without a fault", " ".join(sorted(failed)))

    def _tried(
        self,
        session: pytest.Session,
        number: int,
        fault: Mutant,
        reached: dict[Any, list[str]],
        functions: _Functions,
    ) -> tuple[str, str]:
        """Return whether a fault is killed, and by which tests, one a line."""
        first, last = fault.lines
        path = self.root / fault.module
        tests = {test for line in range(first, last + 1) for test in reached.get(str(line), ())}
        # `coverage` sees no line behind an await that was ended by a cancel and caught it, on
        # Python 3.11: hence the function's.
        codes = [function.__code__ for function in functions.get((str(path), fault.first_line), ())]
        entering = {
            test
            for code in codes
            for *_, line in code.co_lines()
            for test in reached.get(str(line), ())
        }
        passing = [item for item in session.items if item.nodeid in self.secs]
        reaching = [
            item for item in passing if item.nodeid in tests | entering
        ]  # none, where only other processes do
        reaching = reaching or [item for item in passing if _is_own(item, fault)]
        reaching.sort(
            key=lambda item: (
                not _is_own(item, fault),
                item.nodeid not in tests,
                self.secs[item.nodeid],
            )
        )
        items = reaching + [
            item for item in passing if item.nodeid in self.unmeasured and item not in reaching
        ]
        if not items:
            return "survived", "no test runs it"
        source, changed = path.read_text(encoding="utf-8"), path.stat().st_mtime

        def run(out: int) -> None:
            new = fault.applied(source)
            path.write_text(new, encoding="utf-8")  # for the processes that tests start
            os.utime(path, (number, number))  # compiled anew
            _replace_code(functions, path, new, fault)
            killers: list[str] = []
            for test, passed in _run(session, items, lambda test: _write(out, test)):
                if not passed:
                    killers.append(test)
                if killers and not self.every_test:
                    break
            _write(out, ["killed" if killers else "survived", "\n".join(killers)])

        fate, test = "killed", "at the start"
        try:
            with _forked(run, self.hang_secs) as lines:
                for line in lines:
                    match json.loads(line):
                        case [fate, test]:
                            pass
                        case test:
                            pass
        except TimeoutError:
            test = f"{test} hangs"
        finally:
            path.write_text(source, encoding="utf-8")
            os.utime(path, (changed, changed))
        return fate, test


def _is_own(item: pytest.Item, fault: Mutant) -> bool:
    """Whether a test is in a file that is named after the module."""
    return item.path.stem.startswith(f"test_{Path(fault.module).stem.lstrip('_')}")


def _run(
    session: pytest.Session, items: list[pytest.Item], started: Callable[[str], None]
) -> Iterator[tuple[str, bool]]:
    """Run tests in this process, and yield whether each passed."""
    for item, following in zip(items, [*items[1:], None], strict=True):
        started(item.nodeid)
        failed = session.testsfailed
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        yield item.nodeid, session.testsfailed == failed


@contextlib.contextmanager
def _forked(run: Callable[[int], None], hang_secs: float) -> Iterator[Iterator[str]]:
    """Run something in a fork of this process, and give the lines it writes. Kill it when it writes
    none for too long.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        _child(run, writer)
    os.close(writer)
    try:
        with os.fdopen(reader, encoding="utf-8") as lines:
            yield _lines(lines.fileno(), hang_secs)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _child(run: Callable[[int], None], writer: int) -> NoReturn:
    try:
        os.setpgid(0, 0)
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
        run(writer)
    finally:
        os._exit(0)


def _lines(reader: int, hang_secs: float) -> Iterator[str]:
    rest = b""
    while True:
        if not select.select([reader], [], [], hang_secs)[0]:
            raise TimeoutError
        read = os.read(reader, 1 << 16)
        if not read:
            return
        *lines, rest = (rest + read).split(b"\n")
        yield from (line.decode() for line in lines)


def _write(out: int, value: object) -> None:
    text = f"{json.dumps(value)}\n".encode()
    while text:
        text = text[os.write(out, text) :]


_Functions = dict[tuple[str, int], list[types.FunctionType]]


def _library_functions(root: Path) -> _Functions:
    """Return the functions of the imported library by the place of their code."""
    found: _Functions = {}
    for function in gc.get_objects():
        if type(function) is types.FunctionType and function.__code__.co_filename.startswith(
            str(root / "aiohooks")
        ):
            found.setdefault(
                (function.__code__.co_filename, function.__code__.co_firstlineno), []
            ).append(function)
    return found


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _replace_code(functions: _Functions, path: Path, source: str, fault: Mutant) -> None:
    """Give the functions that exist the code with the fault; a module that is not imported yet will
    have it anyway.
    """
    (new,) = (code for code in _codes(compile(source, str(path), "exec")) if _is_of(code, fault))
    for function in functions.get((str(path), fault.first_line), ()):
        function.__code__ = new.replace(
            co_flags=new.co_flags | function.__code__.co_flags & CO_ITERABLE_COROUTINE
        )


def _is_of(code: types.CodeType, fault: Mutant) -> bool:
    return code.co_firstlineno == fault.first_line and code.co_qualname == fault.function


def is_possible(fault: Mutant, source: str) -> bool:
    """Whether the module can be compiled with the fault, and its function can be replaced while it
    exists.
    """
    try:
        new = [
            code.co_freevars
            for code in _codes(compile(fault.applied(source), "", "exec"))
            if _is_of(code, fault)
        ]
    except SyntaxError:
        return False
    return new == [
        code.co_freevars for code in _codes(compile(source, "", "exec")) if _is_of(code, fault)
    ]


def main() -> None:
    """Try the faults of a job, and write a line of JSON for each."""
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    faults = [Mutant(**fields) for fields in job["faults"]]
    arguments = [
        "-q",
        "-p",
        "no:cacheprovider",
        "-m",
        "not slow",
        "--loop",
        "asyncio",
        *job["tests"],
    ]
    trials = Trials(
        faults, int(sys.argv[2]), job["hang_secs"], every_test=job.get("every_test", False)
    )
    sys.exit(pytest.main(arguments, plugins=[trials]))


if __name__ == "__main__":
    main()
