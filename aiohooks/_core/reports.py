"""The logger of the library, and how often repeated failures are logged."""

import logging

logger = logging.getLogger("aiohooks")


def is_logged(count: int, more: int = 1) -> bool:
    """Return whether to log that there are `count` failures, of which `more` are new.

    The log has the first failure, the 10th, the 100th, ...
    """
    return count == more or len(str(count - more)) < len(str(count))
