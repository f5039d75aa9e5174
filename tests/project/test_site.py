"""The sources of the site are complete, and what is checked of the built pages finds what it
should. CI builds the site.
"""

from __future__ import annotations

import inspect
import re
from collections import Counter
from pathlib import Path

import pytest

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
from docs.site.checks import Page, contrast, low_contrasts, of_page, same_titles
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


def test_every_public_name_is_on_a_page() -> None:
    """A page that a person wrote says where each public class and function is met."""
    words = {
        word
        for page in DOCS.rglob("*.md")
        for word in re.findall(r"\w+", page.read_text(encoding="utf-8"))
    }
    assert {path.rpartition(".")[2] for things in entries().values() for path in things} <= words


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
    """Each page of docs/ is in the navigation once, and each page of the navigation exists."""
    write_sources(tmp_path)
    text = (tmp_path / "index.md").read_text(encoding="utf-8")
    listed = [
        line
        for contents in re.findall(r"```\{toctree\}\n(.*?)```", text, re.DOTALL)
        for line in contents.splitlines()
        if line and line[0] != ":"
    ]
    pages = {str(page.relative_to(DOCS).with_suffix("")) for page in DOCS.rglob("*.md")}
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


GOOD = (
    '<html lang="en"><title>A</title><h1 id="a">A</h1><a href="other.html#b">b</a><img src="p.png"'
    ' alt="a picture">'
)


@pytest.mark.parametrize(
    ("html", "problem"),
    [
        (GOOD, None),
        (GOOD.replace("other.html#b", "#a"), None),
        (GOOD.replace("other.html#b", "https://example.org/x"), None),
        (GOOD.replace("other.html", "missing.html"), "the link missing.html#b has no target"),
        (GOOD.replace("#b", "#c"), "the link other.html#c has no target on its page"),
        (GOOD.replace(' alt="a picture"', ""), "the picture p.png has no alternative text"),
        (GOOD.replace(">b<", "><"), "a link has no text"),
        (GOOD.replace("<img", "<button></button><img"), "a button has no text"),
        (GOOD.replace("<img", '<input name="q"><img'), "the field q has no name"),
        (GOOD.replace("<img", '<p id="a"></p><img'), "the id a is there 2 times"),
        (GOOD.replace("<img", "<h3>C</h3><img"), "a heading of level 3 below one of level 1"),
        (GOOD.replace("h1", "p"), "0 headings of the first level"),
        (GOOD.replace(' lang="en"', ""), "the language is not given"),
    ],
)
def test_what_is_wrong_with_a_page_is_found(tmp_path: Path, html: str, problem: str | None) -> None:
    """The check of the built pages names each kind of defect, and nothing else."""
    (tmp_path / "p.png").touch()
    texts = {"page.html": html, "other.html": '<html lang="en"><title>B</title><h1 id="b">B</h1>'}
    for name, text in texts.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    pages = {(tmp_path / name).resolve(): Page(text) for name, text in texts.items()}
    assert list(of_page(tmp_path.resolve() / "page.html", pages)) == ([problem] if problem else [])


def test_low_contrast_is_found(tmp_path: Path) -> None:
    """Colors of the theme and of code that are hard to read are named, in either mode."""
    names = (
        "foreground-primary",
        "foreground-secondary",
        "foreground-muted",
        "brand-content",
        "brand-primary",
        "link",
    )
    colors = "".join(f"--color-{name}:#000;" for name in names)
    furo = f"body{{{colors}--color-background-primary:#fff}}"
    dark = (
        "@media not print{body[data-theme=dark]{--color-background-primary:#101010;"
        + colors.replace("#000", "#eee")
    )
    (tmp_path / "_static" / "styles").mkdir(parents=True)
    (tmp_path / "_static" / "styles" / "furo.css").write_text(
        f"{furo}{dark.replace('link:#eee', 'link:#444')}}}}}", encoding="utf-8"
    )
    code = (
        ".highlight { background: #fff; color: #000 }\n.highlight .k { color: #999 } /* Keyword"
        " */\n"
    )
    (tmp_path / "_static" / "pygments.css").write_text(
        f"{code}@media not print {{ {code} }}", encoding="utf-8"
    )
    light, dark_link, *others = low_contrasts(tmp_path / "_static")
    assert light == "light: .highlight .k: the contrast of #999 on #fff is 2.8, less than 4.5"
    assert dark_link.startswith("dark: link: the contrast of #444 on #101010 is 2.0")
    assert others == ["dark: .highlight .k: the contrast of #999 on #fff is 2.8, less than 4.5"]
    assert contrast("#000", "#ffffff") == 21


def test_pages_with_one_title_are_found() -> None:
    """A title that two pages have is named."""
    pages = [
        Page(f"<title>{title}</title><img><svg><title>a picture</title></svg>") for title in "ABA"
    ]
    assert same_titles(pages) == ["2 pages have the title 'A'"]
