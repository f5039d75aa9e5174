"""How the conformance suites run their checks."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

from aiohooks.errors import InvalidArgumentError, add_note, did_you_mean

_LIMIT_SECS = 60.0
"""How long a check may take.

A broken promise often shows as a wait that never ends.
"""
Check = TypeVar("Check", bound=Callable[..., Any])


def by_name(*checks: Check) -> dict[str, Check]:
    """Return checks by their names."""
    return {check.__name__: check for check in checks}


async def run_checks(
    checks: Mapping[str, Check],
    only: str | None,
    run: Callable[[Check], Awaitable[None]],
) -> None:
    """Await `run` with each check, or only with the check of that name.

    Args:
        checks: the checks by name; their docstrings describe the laws.
        only: the name of the only check to run, or None to run all.
        run: calls a check.

    Raises:
        InvalidArgumentError: there is no check of that name.
        AssertionError: a check took too long.
        Exception: a check failed. A note names it.
    """
    if only is not None and only not in checks:
        raise InvalidArgumentError(f"unknown check {only!r}; {did_you_mean(only, checks)}")
    names = [*checks] if only is None else [only]
    for name in names:
        check = checks[name]
        try:
            async with asyncio.timeout(_LIMIT_SECS):
                await run(check)
        except TimeoutError as error:
            raise AssertionError(f"{name}: stuck for {_LIMIT_SECS:g} s. {check.__doc__}") from error
        except Exception as error:
            add_note(error, f"this fails the check {name}: {check.__doc__}")
            raise
