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

BY_ADDRESS = ",IP:127.0.0.1"
"""What a certificate names besides localhost, if it is for the address as well."""


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two authorities, and certificates of the first for localhost; two are for
    127.0.0.1 as well.
    """
    folder = tmp_path_factory.mktemp("certificates")

    def openssl(*args: str) -> None:
        subprocess.run([program("openssl"), *args], cwd=folder, check=True, capture_output=True)

    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    signs = ["-addext", "keyUsage=critical,keyCertSign"]
    for authority in ("ca", "other"):
        to = [
            "-keyout",
            f"{authority}.key",
            "-out",
            f"{authority}.crt",
            "-days",
            "2",
            "-subj",
            f"/CN={authority}",
        ]
        openssl("req", "-x509", *key, *to, *signs)
    for name, names in (
        ("server", ""),
        ("client", ""),
        ("expired", BY_ADDRESS),
        ("numeric", BY_ADDRESS),
    ):
        (folder / "names").write_text(f"subjectAltName=DNS:localhost{names}\n", encoding="utf-8")
        openssl(
            "req", *key, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}"
        )
        request = ["x509", "-req", "-in", f"{name}.csr", "-out", f"{name}.crt"]
        by = ["-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-extfile", "names"]
        if name != "expired":
            openssl(*request, *by, "-days", "2")
            continue
        try:
            openssl(*request, *by, "-days", "-1")
        except (
            subprocess.CalledProcessError
        ):  # OpenSSL 3.4 has an option for this, and no such days
            dates = ["-not_before", "20240101000000Z", "-not_after", "20240102000000Z"]
            openssl(*request, *by, *dates)
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
