"""The sources of the site are complete, and what is checked of the built pages finds what it
should. CI builds the site.
"""

from __future__ import annotations

import inspect
import re
from collections import Counter
from pathlib import Path

import aiohooks as ah
from docs.site.build import (
    API_PAGES,
    DOCS,
    PACKAGES,
    ROOT_PAGES,
    api_page,
    attribute_docstrings,
    documented,
    entries,
    is_constructor_hidden,
    packages,
    write_sources,
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


def test_every_public_name_has_one_entry_with_a_docstring() -> None:
    """Each public class and function is on one page of the reference, once, and has a docstring."""
    listed = {
        getattr(package, name)
        for package in packages().values()
        for name in getattr(package, "__all__", ())
    }
    assert documented() == {
        thing for thing in listed if inspect.isclass(thing) or inspect.isfunction(thing)
    }
    directives = re.findall(
        r"^\.\. auto\w+:: (\S+)$", "\n".join(map(api_page, API_PAGES)), flags=re.MULTILINE
    )
    assert Counter(directives) == Counter(path for things in entries().values() for path in things)
    assert [
        thing
        for thing in documented()
        if not (vars(thing).get("__doc__") or thing.__doc__ or "").strip()
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


def test_links_lead_to_pages_of_the_site(tmp_path: Path) -> None:
    """Every relative link of the sources, also one that leaves docs/ in the repository, has a
    target among them.
    """
    write_sources(tmp_path)
    wrong: list[str] = []
    for page in sorted(tmp_path.rglob("*.md")):
        prose = re.sub(
            r"^ *```.*?^ *```$",
            "",
            page.read_text(encoding="utf-8"),
            flags=re.MULTILINE | re.DOTALL,
        )
        targets = re.findall(r"\]\(([^)\s#:]+)[)#]", prose)
        wrong += [
            f"{page.relative_to(tmp_path)}: {target}"
            for target in targets
            if not (page.parent / target).is_file()
        ]
    assert wrong == []
    assert "```python\n" in (tmp_path / "source" / "examples" / "timeline.py.md").read_text(
        encoding="utf-8"
    )
    changelog = (tmp_path / "project" / "changelog.md").read_text(encoding="utf-8")
    assert "](../reference/systems.md)" in changelog
    # The README says what the first page says.
    assert "](../index.md)" in (tmp_path / "start" / "install.md").read_text(encoding="utf-8")


def test_every_page_is_in_the_navigation(tmp_path: Path) -> None:
    """Each page of docs/ is in the navigation once, but for the records for maintainers; and each
    page of the navigation exists.
    """
    write_sources(tmp_path)
    text = (tmp_path / "index.md").read_text(encoding="utf-8")
    listed = [
        line
        for contents in re.findall(r"```\{toctree\}\n(.*?)```", text, re.DOTALL)
        for line in contents.splitlines()
        if line and line[0] != ":"
    ]
    places = [page.relative_to(DOCS) for page in DOCS.rglob("*.md")]
    pages = {str(place.with_suffix("")) for place in places if place.parts[0] != "design"}
    project = {f"project/{Path(name).stem.lower()}" for name in ROOT_PAGES}
    assert sorted(listed) == sorted((pages | project) - {"index"})


def test_the_drawings_are_those_of_the_figures() -> None:
    """`python -m docs.site.pictures` was called after the last change of the tables that they
    show.
    """
    for name, svg in pictures().items():
        assert (DOCS / "images" / name).read_text(encoding="utf-8") == svg, (
            f"{name}: call python -m docs.site.pictures"
        )
