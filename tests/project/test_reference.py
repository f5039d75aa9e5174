"""The API reference is complete and current."""

from __future__ import annotations

import importlib
import inspect
import re

import pytest

import aiohooks
import aiohooks.stores
from tests.support import reference_page
from tests.support.source import ROOT


def test_the_page_is_current() -> None:
    """docs/reference.md is what `python -m tests.support.reference_page` makes of the docstrings."""
    assert (ROOT / "docs" / "reference.md").read_text(encoding="utf-8") == reference_page.page()


def test_every_public_name_has_an_entry() -> None:
    """Every name of the front door, and every class of the other public packages, is on the page once."""
    assert set(aiohooks.__all__) <= reference_page.names()
    page = reference_page.page()
    for package in ("aiohooks.hooks", "aiohooks.stores", "aiohooks.testing"):
        for name, thing in vars(importlib.import_module(package)).items():
            if inspect.isclass(thing) and not name.startswith("_"):
                assert page.count(f"\n### {name}\n") == 1, name


@pytest.mark.parametrize("path", sorted(reference_page.NOT_FOR_USERS))
def test_what_is_left_out_exists(path: str) -> None:
    """What the page leaves out is still there; else the list is out of date."""
    name, attribute = path.split(".")
    cls = getattr(aiohooks, name, None) or getattr(aiohooks.stores, name)
    assert hasattr(cls, attribute) or re.search(rf"self\.{attribute}\b.*=", inspect.getsource(cls.__init__))


def test_each_entry_says_something() -> None:
    """Below every heading of the page there is a text, not only a signature."""
    empty = []
    for part in reference_page.page().split("\n##")[1:]:
        heading, _, body = part.lstrip("#").partition("\n")
        if part.startswith("#") and not body.replace("```text", "").split("```")[-1].strip():
            empty.append(heading.strip())
    assert empty == []
