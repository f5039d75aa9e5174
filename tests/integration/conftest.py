"""What tests of several engines need: certificates, names of runs, and a loop that has opened
streams.
"""

from __future__ import annotations

import itertools
import subprocess
from pathlib import Path

import pytest

from tests.support.needs import program
from tests.support.store_servers import first_stream

numbers = itertools.count(1)


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two authorities, and a certificate of the first for localhost."""
    folder = tmp_path_factory.mktemp("certificates")

    def openssl(*args: str) -> None:
        subprocess.run([program("openssl"), *args], cwd=folder, check=True, capture_output=True)

    def make(name: str, *args: str) -> None:
        key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
        files = ("-keyout", f"{name}.key", "-out", f"{name}.crt", "-days", "2")
        openssl("req", "-x509", *key, *files, "-subj", f"/CN={name}", "-addext", *args)

    for authority in ("ca", "other"):
        make(authority, "keyUsage=critical,keyCertSign")
    signed_by = ("-CA", "ca.crt", "-CAkey", "ca.key")
    make("server", "subjectAltName=DNS:localhost", *signed_by)
    return folder


@pytest.fixture
def run() -> str:
    """The name of a new run."""
    return f"run {next(numbers)}"


@pytest.fixture
async def streams() -> None:
    """Open a stream, after which uvloop keeps a spare descriptor for as long as it lives; tests
    count what they leave open.
    """
    await first_stream()
