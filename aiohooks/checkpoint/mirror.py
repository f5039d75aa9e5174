"""The options and the status of a mirror: copies of checkpoints in a file system of fsspec."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from aiohooks._core.validate import check_instance, check_mapping, check_secs
from aiohooks._core.waits import Backoff
from aiohooks.errors import InvalidArgumentError


@dataclass(frozen=True, slots=True, repr=False)
class Mirror:
    """Where and how the checkpoints of a `Saver` are mirrored.

    Args:
        url: a directory of any file system that fsspec knows, such as "s3://bucket/run". Only one
            run may write there. The directory must exist, or the bucket of an object store.
        storage_options: arguments of the file system, such as credentials and time limits.
        timeout_secs: an operation of the file system, such as the transfer of 8 MiB, fails if it
            takes longer.
        backoff: the pauses between attempts of an upload, which have no end.

    Raises:
        InvalidArgumentError: an argument is invalid.
    """

    url: str
    storage_options: Mapping[str, Any] | None = None
    timeout_secs: float = 60.0
    backoff: Backoff = Backoff(initial_secs=1.0, max_secs=60.0)

    def __post_init__(self) -> None:
        if not isinstance(self.url, str) or not self.url:
            raise InvalidArgumentError(
                f'the URL of a mirror is {self.url!r}; give a str such as "s3://bucket/run"',
            )
        check_mapping(self.storage_options, "storage_options")
        check_secs(self.timeout_secs, "timeout_secs", positive=True)
        check_instance(self.backoff, Backoff, "backoff")

    def __repr__(self) -> str:
        return f"Mirror({str(self)!r})"

    def __str__(self) -> str:
        """Return the URL without user and password."""
        return re.sub(r"(?<=://)[^/]*@", "", self.url)


@dataclass(frozen=True, slots=True)
class MirrorStatus:
    """What a `Saver` has copied to its mirror.

    Attributes:
        url: the mirror, without user and password.
        latest_step: the step of the checkpoint that was copied last, or found to be there; None
            before the first.
        pending: how many are being copied or wait for it.
        failures: how many attempts have failed.
        error: why the last attempt failed; None if it did not.
    """

    url: str
    latest_step: int | None = None
    pending: int = 0
    failures: int = 0
    error: str | None = None

    def __str__(self) -> str:
        parts = [f"mirror {self.url}: latest step {self.latest_step}"]
        if self.pending:
            parts.append(f"{self.pending} pending")
        if self.failures:
            parts.append(f"{self.failures} failures")
        if self.error is not None:
            parts.append(f"failing: {self.error}")
        return ", ".join(parts)
