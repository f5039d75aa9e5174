"""What is said when the package behind an extra is not installed."""

from __future__ import annotations


def missing_extra(who: str, extra: str) -> ImportError:
    """The error that says what to install; raised by the one module that imports the extra's package."""
    return ImportError(f"{who} needs a package that is not installed; pip install 'aiohooks[{extra}]'")
