"""Guarding against a loss that is not a number."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from typing import Any, Literal, cast

from aiohooks._errors import InvalidArgumentError, NanLossDuringTrainingError
from aiohooks._hook import SessionRunArgs, SessionRunContext, SessionRunHook, SessionRunValues

_logger = logging.getLogger("aiohooks.hooks")


class NanHook(SessionRunHook):
    """Watches a value of every run, and ends the session when anything in it is not a number, or infinite.

    The value may be a number, an array, or a nested list of these.
    """

    def __init__(self, value: Any, *, fail_on_nan_loss: bool = True, check: Literal["nan", "non-finite"] = "non-finite") -> None:
        """Takes what to watch.

        Args:
            value: a node or name.
            fail_on_nan_loss: whether to raise; otherwise it warns and requests a stop.
            check: `"nan"` lets infinities pass.

        Raises:
            InvalidArgumentError: no value, or another `check`.
        """
        if value is None:
            raise InvalidArgumentError("value is None; give the node or name to watch")
        if check not in ("nan", "non-finite"):
            raise InvalidArgumentError(f'check is {check!r}; give "nan" or "non-finite"')
        self._value = value
        self._fail = fail_on_nan_loss
        self._nan_only = check == "nan"

    async def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        """Asks for the value."""
        return SessionRunArgs(self._value)

    async def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        """Looks at it.

        Raises:
            NanLossDuringTrainingError: something in it is bad, and it is to fail.
        """
        is_good = _is_number if self._nan_only else math.isfinite
        bad = next((number for number in _numbers(run_values.results) if not is_good(number)), None)
        if bad is None:
            return
        message = f"model diverged with {self._value!r} = {bad} at step {run_context.global_step}"
        if self._fail:
            raise NanLossDuringTrainingError(message)
        _logger.warning("%s", message)
        run_context.request_stop(message)


def _is_number(value: float) -> bool:
    return not math.isnan(value)


def _numbers(value: Any) -> Iterable[float]:
    if hasattr(value, "tolist"):  # an array of any library, or one of its scalars
        value = value.tolist()
    if isinstance(value, (list, tuple)):
        items = cast("Iterable[Any]", value)
        for item in items:
            yield from _numbers(item)
    elif isinstance(value, complex):
        yield value.real
        yield value.imag
    elif value is not None:
        yield float(value)
