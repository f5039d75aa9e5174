"""Evaluating something once, at the end."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from aiohooks._checks import check_mapping
from aiohooks._errors import is_clean_end
from aiohooks._hook import SessionRunHook

if TYPE_CHECKING:
    from aiohooks._session import Session

_logger = logging.getLogger("aiohooks.hooks")


class FinalOpsHook(SessionRunHook):
    """Runs `final_ops` when the session ends cleanly, and keeps the values in `final_ops_values`."""

    def __init__(self, final_ops: Any, *, feed_dict: Mapping[Any, Any] | None = None) -> None:
        """Takes fetches, nested at will (None: nothing), and what to feed them."""
        check_mapping(feed_dict, "feed_dict")
        self._final_ops = final_ops
        self._feed_dict = feed_dict
        self.final_ops_values: Any = None
        """The values in the shape of the fetches; None before the end."""

    async def begin(self) -> None:
        """Forgets the values of an earlier session."""
        self.final_ops_values = None

    async def end(self, session: Session) -> None:
        """Runs the operations. An end-of-input error is an error here: final operations must not read input."""
        if self._final_ops is None:
            return
        try:
            self.final_ops_values = await session.run(self._final_ops, feed_dict=self._feed_dict)
        except Exception as error:
            if is_clean_end(error):
                _logger.warning("final ops %r ended with %r: they must not read input, which has ended", self._final_ops, error)
            raise
