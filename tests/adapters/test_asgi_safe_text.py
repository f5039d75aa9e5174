"""Texts of others in answers and log lines."""

from __future__ import annotations

import random
import string

import pytest

from aiohooks.adapters.asgi._access import safe_error, safe_text

SPECIAL = [
    "\n",
    "\r",
    "\x00",
    "\x1b[31m",
    "\u202e",
    "\u2028",
    "\x85",
    "\ud800",
    "\U000e0001",
    "<b>",
    "&",
    "'",
    '"',
    "\\",
    "é",
    "漢",
]


@pytest.mark.parametrize("seed", range(500))
def test_it_is_one_printable_line(seed: int) -> None:
    """Whatever the text is, what is shown is one printable line of limited length."""
    order = random.Random(seed)
    text = "".join(order.choice([*SPECIAL, *string.ascii_letters]) for _ in range(order.randint(0, 1000)))
    shown = safe_text(text, 200)
    assert shown.isprintable()
    assert len(shown) <= 200
    assert len(shown.splitlines()) <= 1


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain text, é and 漢", "plain text, é and 漢"),
        ("at Hang.run (/srv/a b/train.py:7), in wait (C:\\lib\\x.py:213)", "at Hang.run, in wait"),
        ("no answer (10.0.0.1:6379)", "no answer (10.0.0.1:6379)"),
        ("redis://user:hunter2@db:6379/0 is away", "redis://***@db:6379/0 is away"),
        ("postgresql+asyncpg://u:p%40ss@h/d", "postgresql+asyncpg://***@h/d"),
        ("connect(password='hunter2', user='me')", "connect(password=***, user='me')"),
        ("{'api_key': 'hunter2'}", "{'api_key': ***}"),
        ("AWS_SECRET_ACCESS_KEY=hunter2 is wrong", "AWS_SECRET_ACCESS_KEY=*** is wrong"),
        ("Authorization: Bearer hunter2", "Authorization: ***"),
        ("https://h/p?access_token=hunter2&x=1", "https://h/p?access_token=***&x=1"),
        ("https://example.com/a@b is fine", "https://example.com/a@b is fine"),
        ("a\nb\x1b\u202e\ud800", "a\\x0ab\\x1b\\u202e\\ud800"),
    ],
)
def test_what_looks_like_a_password_is_left_out(text: str, shown: str) -> None:
    """Userinfo of URLs and values of names that say so are replaced; the rest stays readable."""
    assert safe_text(text) == shown


def test_a_long_text_takes_no_long_time() -> None:
    """Only the beginning of a text is looked at, however long it is."""
    assert safe_text("://" + "a" * 10_000_000, 50) == "://" + "a" * 44 + "..."


def test_an_error_is_its_class_and_what_it_says() -> None:
    """No traceback, no cause; also of an error that cannot say what happened."""

    class MuteError(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    assert safe_error(OSError("no\npaper")) == "OSError: no\\x0apaper"
    assert safe_error(OSError()) == "OSError"
    assert safe_error(MuteError()) == "MuteError: (its message cannot be shown)"
