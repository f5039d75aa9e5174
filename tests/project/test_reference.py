"""The API reference is complete and current."""

from __future__ import annotations

import importlib
import inspect
from collections import Counter

import aiohooks as ah
from tests.support import reference_page
from tests.support.source import ROOT, defined_names, modules


def test_the_page_is_current() -> None:
    """docs/reference.md is what `python -m tests.support.reference_page` writes from the docstrings."""
    assert (ROOT / "docs" / "reference.md").read_text(encoding="utf-8") == reference_page.page()


def test_every_public_package_has_a_section() -> None:
    """The page covers every package and module that lists its public names in `__all__`."""
    public = {module for module in modules() if "__all__" in defined_names(module)}
    assert public <= set(reference_page.PACKAGES)


def test_every_public_name_has_one_entry() -> None:
    """Each public class and function has an entry, and each heading of an entry is on the page once."""
    listed = {
        getattr(importlib.import_module(package), name)
        for package in reference_page.PACKAGES
        for name in getattr(importlib.import_module(package), "__all__", ())
    }
    assert {thing for thing in listed if inspect.isclass(thing) or inspect.isfunction(thing)} == reference_page.documented()
    headings = Counter(line for line in reference_page.page().splitlines() if line.startswith("### "))
    assert set(headings.values()) == {1}
    assert len(headings) == len(reference_page.documented())


def test_each_entry_says_something() -> None:
    """Below every heading of the page there is a text, not only a signature."""
    empty = []
    for part in reference_page.page().split("\n##")[1:]:
        heading, _, body = part.lstrip("#").partition("\n")
        if part.startswith("#") and not body.replace("```text", "").split("```")[-1].strip():
            empty.append(heading.strip())
    assert empty == []


def test_the_parts_of_a_session_are_described() -> None:
    """The page says what each public attribute of a raw session is."""
    page = reference_page.page()
    names = [name for name in vars(ah.Session(ah.Graph())) if not name.startswith("_")]
    internal = {"grace_secs", "stateful_hooks", "state_of", "drain_hooks"}
    assert [name for name in names if f"- `Session.{name}` (" not in page and name not in internal] == []
