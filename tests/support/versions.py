"""Tries the lowest or the newest versions of what the library and its extras depend on.

    python -m tests.support.versions lowest                 # the core and each extra
    python -m tests.support.versions newest redis ray       # some of them
    python -m tests.support.versions newest --of-the-day    # a small one, each day another

For each it makes an environment with the library as built from this checkout, the packages of the
extra and nothing else; `lowest` installs exactly the floors of pyproject.toml. There it runs the
extra's program of `smoke.py`. Redis gets a server of this environment. The table has the versions
that were installed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from tests.support.smoke import PROGRAMS
from tests.support.source import ROOT
from tests.support.store_servers import running

CORE = "core"
"""The name of the library without any extra."""
NOT_FOR_USERS = ("examples", "test")
"""Extras that are for this checkout."""
SEVERAL = "all"
"""The extra that brings the others, but the large ones."""
LARGE = ("tensorflow", "ray")
"""Extras that bring gigabytes, or start a cluster: they are tried by hand."""


_FILE: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT: dict[str, Any] = _FILE["project"]


def requirements_of_extra(extra: str) -> list[Requirement]:
    """Return the requirements of an extra."""
    return [Requirement(line) for line in PROJECT["optional-dependencies"][extra]]


def requirements() -> Mapping[str, list[Requirement]]:
    """Return what the library needs in this environment, and what it needs with each extra."""
    listed: dict[str, list[str]] = {
        CORE: PROJECT["dependencies"],
        **PROJECT["optional-dependencies"],
    }
    found: dict[str, list[Requirement]] = {}
    for name, lines in listed.items():
        if name not in (*NOT_FOR_USERS, SEVERAL):
            every = [Requirement(line) for line in dict.fromkeys([*listed[CORE], *lines])]
            found[name] = [one for one in every if one.marker is None or one.marker.evaluate()]
    return found


def floor_of(requirement: Requirement) -> str:
    """Return the lowest version that a requirement allows."""
    (only,) = requirement.specifier
    assert only.operator == ">=", f"{requirement} has no floor"
    return only.version


def extra_of_the_day(day: int) -> str:
    """Return the extra that CI tries on this day: all but the large ones have their turn."""
    small = [extra for extra in requirements() if extra not in LARGE]
    return small[day % len(small)]


def build_wheel(folder: Path) -> Path:
    """Build the library from this checkout."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "-w",
        str(folder),
        str(ROOT),
    ]
    subprocess.run(command, check=True)
    (wheel,) = folder.glob("aiohooks-*.whl")
    return wheel


def make_environment(folder: Path, packages: Sequence[str]) -> Path:
    """Make an environment with these packages; return its Python."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    python = folder / "bin" / "python"
    command = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(python),
        "install",
        "-q",
        "--no-compile",
        *packages,
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise ValueError(done.stderr.strip().splitlines()[-1])
    return python


def installed(python: Path, names: Sequence[str]) -> str:
    """Return the versions of these packages in an environment."""
    program = (
        "import importlib.metadata as m, sys; print(', '.join(f'{n} {m.version(n)}' for n in"
        " sys.argv[1:]))"
    )
    return subprocess.run(
        [python, "-c", program, *names], capture_output=True, text=True, check=True
    ).stdout.strip()


@contextlib.contextmanager
def server_url(extra: str, folder: Path) -> Iterator[str]:
    """Run a server for the extra that needs one; yield its URL, or nothing for the others."""
    if extra != "redis":
        yield ""
        return
    with running("valkey", folder) as server:
        yield server.url


def run_program(python: Path, extra: str, url: str) -> str:
    """Run the program of an extra; return its last line if it failed, or nothing."""
    program = importlib.util.find_spec("tests.support.smoke")
    assert program is not None
    assert program.origin is not None
    command = [str(python), "-P", program.origin, f"{extra}={url}" if url else extra]
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environ)
    return "" if done.returncode == 0 else (done.stderr.strip().splitlines() or ["no output"])[-1]


def tried(
    extra: str, needed: Sequence[Requirement], which: str, wheel: Path, folder: Path
) -> tuple[str, str]:
    """Try one extra; return the versions, and what failed."""
    pins = [f"{one.name}=={floor_of(one)}" for one in needed] if which == "lowest" else []
    library = str(wheel) if extra == CORE else f"{wheel}[{extra}]"
    try:
        python = make_environment(folder / "environment", [library, *pins])
    except ValueError as error:
        return ", ".join(pins), str(error)
    with server_url(extra, folder) as url:
        return installed(python, [one.name for one in needed]), run_program(python, extra, url)


def main(arguments: Sequence[str] | None = None) -> int:
    """Try the versions; return 1 if one fails."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.support.versions",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("which", choices=["lowest", "newest"])
    parser.add_argument(
        "extras", nargs="*", metavar="EXTRA", help=f"{', '.join(PROGRAMS)} (default: all)"
    )
    parser.add_argument("--of-the-day", action="store_true", help="the extra whose turn it is")
    options = parser.parse_args(arguments)
    needed = requirements()
    failed = False
    with tempfile.TemporaryDirectory() as name:
        wheel = build_wheel(Path(name))
        of_the_day = [extra_of_the_day(int(time.time() // 86_400))] if options.of_the_day else []
        for extra in options.extras or of_the_day or list(needed):
            folder = Path(name, extra)
            folder.mkdir()
            began = time.monotonic()
            versions, failure = tried(extra, needed[extra], options.which, wheel, folder)
            failed = failed or bool(failure)
            print(
                f"{extra:14} {failure or 'in order':10} {versions}"
                f" ({time.monotonic() - began:.0f} s)",
                flush=True,
            )
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
