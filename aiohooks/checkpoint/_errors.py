"""What a file is found to be damaged with."""

from __future__ import annotations


class DamagedError(Exception):
    """What reading one file found wrong with it; private to this package, a `CorruptCheckpointError` is made of it."""
