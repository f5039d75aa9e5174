"""The logger of the library."""

import logging

logger = logging.getLogger("aiohooks")
