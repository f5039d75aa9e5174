"""Texts of others, made fit to be shown: one line, printable, of limited length, without passwords."""

from __future__ import annotations

import re

_LONGEST = 500
_USERINFO = re.compile(r"(?<=://)[^\s/@'\"]+@")
_SECRET = re.compile(
    r"(?P<name>[\w-]*(?:password|passwd|secret|token|api[_-]?key|authorization)[\w-]*['\"]?\s*[=:]\s*)"
    r"(?P<value>(?:bearer|basic)\s+\S+|'[^']*'|\"[^\"]*\"|[^\s,;)}\]&]+)",
    re.IGNORECASE,
)
_PLACE = re.compile(r" \([^()\n]*\.py:[0-9]+\)")


def safe_text(text: str, longest: int = _LONGEST) -> str:
    """The text for an answer or a log line.

    What is not printable (control and escape characters, line ends, characters that turn the direction of reading) is
    written as its code. Lines of files, which a stall names, are left out, and so is what looks like a password in a URL or is
    assigned to a name that says so. That is a net for accidents, not a promise: errors are better made without secrets.
    """
    shown = _SECRET.sub(r"\g<name>***", _USERINFO.sub("***@", _PLACE.sub("", text[: 4 * longest])))
    shown = "".join(one if one.isprintable() else _code(one) for one in shown)
    return shown if len(shown) <= longest else f"{shown[: longest - 3]}..."


def safe_error(error: BaseException) -> str:
    """An error in one line: its class and what it says; no traceback."""
    try:
        said = str(error)
    except Exception:  # an error whose own __str__ fails
        said = "(it cannot say what happened)"
    return safe_text(f"{type(error).__name__}: {said}" if said else type(error).__name__)


def _code(one: str) -> str:
    number = ord(one)
    return f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"
