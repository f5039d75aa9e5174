"""The words of the project: each word that was replaced, with the word that is used instead."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tests.support.source import PACKAGE, ROOT, python_files, tree

FOLDERS = ("aiohooks", "docs", "tests", "examples", ".ci")
FILES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "pyproject.toml")
SUFFIXES = {".py", ".md", ".lua", ".toml", ""}

# Whole words, in any case: names in the code and words of the text. Parts of a name that are joined
# by `_` are words, too.
WORDS: dict[str, str] = {
    "so-manieth": "attempt number",
    "made up": "invented, composed",
    "somebody(?:'s)?": "name the role: another process, a third party",
    "nobody(?:'s)?": "no one, or name the role: no waiter",
    "the one who": "name the role",
    "cannot be meant": "invalid",
    "senseless": "invalid",
    "for ever": "indefinitely",
    "(?:is|are|was|were|be|been|being) told(?! apart| from)": "is notified, gets",
    "tell(?:s|ing)? (?:of|him|her|it|nobody|who|everybody)": "notify",
    "(?:goes|going|go|gone|went) on": "continue, be active",
    "at once": "immediately, at the same time",
    "of the moment": "current",
    "in (?:one|the same|that) moment": "together, in the same tick",
    "hears?(?: of)?|heard(?: of)?|unheard": "is notified, learns",
    "takes up": "continues, uses",
    "comes? of (?:it|this|them)": "result",
    "(?:of|to|by|from) who": "the caller, the waiter",
    "who (?:waits|asks|calls)": "the waiter, the caller",
}
_ANY = "|".join(f"({word})" for word in WORDS).replace(" ", r"\s+")
PATTERN = re.compile(rf"(?<![A-Za-z0-9])(?:{_ANY})(?![A-Za-z0-9])", re.IGNORECASE)

# In the prose of pages, docstrings and messages. Names in the code may stay, and so may records of
# decisions and the glossary.
OF_THE_FIELD: dict[str, str] = {
    r"(?<!memory )(?<!arrays )overlap\w*": "run concurrently, concurrent",
    r"composites?": "composed object",
    r"lifecycles?(?! of a session|: )": "hook interface",
    r"what waits(?! for)": "what is concurrent, what is pending",
    r"tried so": "simulated",
    r"entered once": "single-use",
    r"takes? (?:no )?part (?:in|from) the next call(?: on)?": "applies from the next call",
    r"own machine": "local machine",
    r"no choice for good": "not locked in",
    r"(?:both|hooks|methods that) answer": "result",
    r"answers? (?:of|that|which) (?:hooks?|several|counts?|is not None)": "result",
}
MODULES = re.compile(r"^ *\w+  +", re.MULTILINE)
"""The name of a module or class in a list of them."""

NO_PROSE = re.compile(
    r"^ *```.*?^ *```$|`[^`]*`|\]\([^)]*\)|^# .*?$|also called a lifecycle",
    re.MULTILINE | re.DOTALL,
)
"""Code, the targets of links, titles."""


def uses(text: str) -> list[tuple[int, str, str]]:
    """Return each use of a replaced word: its line, the words, and what to write instead."""
    text = text.replace("_", " ")
    found: list[tuple[int, str, str]] = []
    for match in PATTERN.finditer(text):
        assert match.lastindex is not None
        line = text.count("\n", 0, match.start()) + 1
        found.append(
            (line, " ".join(match.group().split()), list(WORDS.values())[match.lastindex - 1])
        )
    return found


def files() -> list[Path]:
    """Return the project's text files, except this one."""
    paths = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*"))] + [
        ROOT / name for name in FILES
    ]
    return [
        path
        for path in paths
        if path.suffix in SUFFIXES
        and path.is_file()
        and path != Path(__file__)
        and "__pycache__" not in path.parts
    ]


def test_replaced_words_are_not_used() -> None:
    """No file uses a word that was replaced by the field's standard term or by plain English."""
    assert [
        f"{path.relative_to(ROOT)}:{line}: {words} -> {instead}"
        for path in files()
        for line, words, instead in uses(path.read_text(encoding="utf-8"))
    ] == []


def test_pages_say_what_the_field_says() -> None:
    """A reader who knows callbacks and plugins meets their words: concurrent, result, hook
    interface.
    """
    pages = [
        ROOT / "README.md",
        *(ROOT / "docs").rglob("*.md"),
    ]
    found = [
        use
        for page in pages
        for use in _unusual(page, NO_PROSE.sub("", page.read_text(encoding="utf-8")))
    ]
    assert found == []


def test_docstrings_and_messages_say_what_the_field_says() -> None:
    """What a program prints, and what an editor shows, has the words of the pages."""
    found: list[str] = []
    for path in python_files(PACKAGE):
        texts = (node.value for node in ast.walk(tree(path)) if isinstance(node, ast.Constant))
        prose = (MODULES.sub("", text) for text in texts if isinstance(text, str) and " " in text)
        found += [use for text in prose for use in _unusual(path, NO_PROSE.sub("", text))]
    assert found == []


def _unusual(path: Path, text: str) -> list[str]:
    """Return the words in `text` for which the field has others."""
    return [
        f"{path.name}: {match[0]} -> {instead}"
        for word, instead in OF_THE_FIELD.items()
        for match in re.finditer(
            rf"(?<![\w.])(?:{word})(?!\w)", " ".join(text.split()), re.IGNORECASE
        )
    ]
