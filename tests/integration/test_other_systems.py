"""The library on systems that lack what Linux has: each program in a process from which that was
taken away.

No other system than Linux was tried for real; docs/reference/systems.md says what follows from
these.
"""

from __future__ import annotations

import signal

import pytest

from tests.support.other_system_programs import PROGRAMS
from tests.support.processes import run_python

pytestmark = pytest.mark.slow

WORKS_ONLY_ON = {"unix": ("darwin",), "no_inotify": ("darwin",), "refusals": ("win32",)}
EXIT_CODES = {"signals": 128 + signal.SIGTERM}


@pytest.mark.parametrize(
    ("system", "program"),
    [
        (system, program)
        for system in ("darwin", "win32")
        for program in PROGRAMS
        if system in WORKS_ONLY_ON.get(program, ("darwin", "win32"))
    ],
)
def test_it_works_or_says_what_is_missing(system: str, program: str) -> None:
    """Without what the system lacks everything works, or is refused at its first use with what to
    do instead.
    """
    done = run_python("-m", "tests.support.other_system_programs", system, program)
    assert done.returncode == EXIT_CODES.get(program, 0), done.stderr
