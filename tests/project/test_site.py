"""The sources of the site are complete. CI builds the site, which fails on a broken link, a page
outside of the navigation and a missing entry.
"""

from __future__ import annotations

import inspect
import re

import aiohooks as ah
from docs.site.build import (
    DOCS,
    PACKAGES,
    attribute_docstrings,
    entries,
    is_constructor_hidden,
    packages,
)
from docs.site.pictures import pictures
from tests.support.source import defined_names, modules


def test_every_public_package_has_a_page() -> None:
    """The API reference covers every package and module that lists its public names in `__all__`.

    The adapter of TensorFlow has a guide too, which shows all its names.
    """
    assert {module for module in modules() if "__all__" in defined_names(module)} <= set(PACKAGES)
    text = (DOCS / "migrating" / "differences-from-tensorflow.md").read_text(encoding="utf-8")
    assert [
        name
        for name in packages()["aiohooks.adapters.tensorflow"].__all__
        if f"`{name}" not in text
    ] == []


def test_the_attributes_of_a_session_are_described() -> None:
    """Each public attribute of a raw session is followed by a docstring."""
    described = {name for owner, name, _ in attribute_docstrings() if owner == "Session"}
    assert {name for name in vars(ah.Session(ah.Graph())) if not name.startswith("_")} <= described


def test_every_constructor_argument_is_described() -> None:
    """Each argument that the site shows is in the docstring of the class, its constructor or
    function, or has one of its own.
    """
    own = {(owner, name) for owner, name, _ in attribute_docstrings()}
    shown: list[str] = []
    missing: list[str] = []
    for path, thing in (
        (path, thing) for things in entries().values() for path, thing in things.items()
    ):
        if is_constructor_hidden(thing):
            continue
        classes = (
            [each for each in thing.__mro__ if each is not object] if inspect.isclass(thing) else []
        )
        text = "\n".join(
            inspect.getdoc(each) or ""
            for each in (thing, *([thing.__init__, thing.__new__] if classes else ()))
        )
        for name in inspect.signature(thing).parameters:
            shown.append(f"{path}({name})")
            described = re.search(
                rf"^ *(\w+, )*\*{{0,2}}{name}(, \w+)*( \(.*\))?:|`{name}`", text, re.MULTILINE
            )
            if not described and not any((each.__name__, name) in own for each in classes):
                missing.append(shown[-1])
    assert missing == [], f"{len(missing)} of {len(shown)} arguments are not described"
    assert len(shown) > 400


def test_the_drawings_are_those_of_the_figures() -> None:
    """`python -m docs.site.pictures` was called after the last change of the tables that they
    show.
    """
    for name, svg in pictures().items():
        assert (DOCS / "images" / name).read_text(encoding="utf-8") == svg, (
            f"{name}: call python -m docs.site.pictures"
        )
