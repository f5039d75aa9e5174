"""A check of step stores, for people who write one."""

from __future__ import annotations

import asyncio

from aiohooks._errors import InvalidArgumentError
from aiohooks.testing._law_tools import MakeStore, opened
from aiohooks.testing._laws import LAWS


async def check_step_store(make: MakeStore, law: str | None = None, *, limit_secs: float = 60.0) -> None:
    """Checks that a store keeps the laws, or one of `step_store_laws`.

    Args:
        make: makes a store of the run that it is given the name of, once for each process that is imitated; it must start
            with nothing. For a store of one process it returns the same one for the same name.
        law: the name of one law; left out, all of them.
        limit_secs: how long one law may take.

    Raises:
        AssertionError: a law is broken; the message names it.
    """
    if law is not None and law not in LAWS:
        raise InvalidArgumentError(f"law={law!r}: there are {', '.join(LAWS)}")
    for name in LAWS if law is None else [law]:
        try:
            async with asyncio.timeout(limit_secs), opened(make) as run:
                await LAWS[name](run)
        except TimeoutError as error:
            raise AssertionError(f"{name}: stuck for {limit_secs:g} s. {LAWS[name].__doc__}") from error
        except Exception as error:
            error.add_note(f"this breaks the law {name}: {LAWS[name].__doc__}")
            raise


def step_store_laws() -> list[str]:
    """The names of the laws, for a parametrised test."""
    return list(LAWS)
