"""Configuration of Sphinx; `python -m docs.site.build FOLDER` writes the sources and runs it.

Every public object has one entry, at its public path. A name in backticks, in a docstring or on a
page, links to its entry.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import re
import sys
from collections import defaultdict
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.util.nodes import make_refnode

import aiohooks
from docs.site.build import (
    DESCRIPTION,
    REPOSITORY,
    SITE,
    entries,
    is_constructor_hidden,
    public_bases,
)
from tests.support.source import ROOT, defined_names, modules
from tests.support.stand_ins import stand_ins

project = "aiohooks"
author = "The aiohooks authors"
copyright = author
version = release = aiohooks.__version__
extensions = [
    *(
        "myst_parser",
        "sphinx.ext.autodoc",
        "sphinx.ext.napoleon",
        "sphinx.ext.intersphinx",
        "sphinx.ext.linkcode",
    ),
    *(
        "sphinx_copybutton",
        "sphinx_design",
        "sphinx_sitemap",
        "sphinxext.opengraph",
        "notfound.extension",
    ),
]

myst_heading_anchors = 6
myst_enable_extensions = ["colon_fence"]
# Where there is a network: `python -m docs.site.build --inventories FOLDER`.
intersphinx_mapping = {
    "python": ("https://docs.python.org/3", None),
    "anyio": ("https://anyio.readthedocs.io/en/stable", None),
    "torch": ("https://docs.pytorch.org/docs/stable", None),
}
if "AIOHOOKS_SITE_INVENTORIES" not in os.environ:
    intersphinx_mapping = {}

default_role = "py:obj"  # of backticks in docstrings
add_module_names = False
toc_object_entries_show_parents = "hide"
python_use_unqualified_type_names = True
maximum_signature_line_length = 100
autoclass_content = "both"  # the arguments are described where they are taken: in `__init__`
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autodoc_type_aliases = {"How": "How"}  # a long union of texts
napoleon_numpy_docstring = False
napoleon_custom_sections = [("Attributes", "params_style")]

html_theme = "furo"
html_title = f"aiohooks {release}"
html_short_title = "aiohooks"
html_baseurl = SITE
html_copy_source = False
html_static_path = ["static", "images/logo.svg", "images/preview.png"]
html_favicon = "images/logo.svg"
html_logo = "images/logo.svg"
html_css_files, html_js_files = ["site.css"], ["site.js"]
html_search_scorer = str(ROOT / "docs" / "static" / "scorer.js")
html_theme_options = {
    **{
        "source_repository": f"{REPOSITORY}/",
        "source_branch": "main",
        "source_directory": "docs/",
    },
    "footer_icons": [
        {"name": "The repository", "url": REPOSITORY, "html": "GitHub", "class": ""}
    ],
}
sitemap_url_scheme = "{link}"
sitemap_show_lastmod = False
ogp_site_url = SITE
ogp_description_length = 200
ogp_image = "_static/preview.png"
ogp_image_alt = "aiohooks: run async hooks, callbacks and plugins concurrently"
ogp_enable_meta_description = True
ogp_social_cards = {"enable": False}
notfound_urls_prefix = "/aiohooks/"
copybutton_exclude = ".linenos, .gp, .go"
copybutton_selector = (
    "div:not(.highlight-text) > div.highlight > pre"  # what is printed is read, and not copied
)
pygments_style, pygments_dark_style = (
    "a11y-light",
    "a11y-dark",
)  # all of whose colors have enough contrast
html_show_sphinx = False


def setup(app: Sphinx) -> None:
    """Connect the functions below."""
    stood_in = contextlib.ExitStack()
    stood_in.enter_context(stand_ins())  # autodoc imports the adapters, too
    app.connect("build-finished", lambda app, error: stood_in.close())
    name_defining_modules()
    app.connect("autodoc-process-docstring", drop_summary_of_constructor, priority=390)
    app.connect(
        "autodoc-process-docstring", mark_code, priority=400
    )  # before the sections of Google's form are read
    app.connect("autodoc-process-docstring", keep_attribute, priority=600)  # ... and after it
    app.connect("autodoc-process-signature", hide_constructor)
    app.connect("autodoc-process-signature", show_constants)
    app.connect("autodoc-process-bases", show_public_bases)
    app.connect("autodoc-skip-member", skip_member)
    app.connect("doctree-read", refer_to_names)
    app.connect("doctree-resolved", let_names_break)
    app.connect(
        "html-page-context", describe_first_page, priority=400
    )  # before opengraph describes pages that lack it
    app.connect("html-page-context", fold_navigation, priority=900)  # after furo has made it
    app.connect("missing-reference", resolve_name)


# -- docstrings


def name_defining_modules() -> None:
    """Set each class's module to its source: there autodoc finds docstrings of attributes."""
    for package, things in entries().items():
        for thing in filter(inspect.isclass, things.values()):
            own = [module for module in modules() if module.startswith(package)]
            thing.__module__ = next(
                module for module in (*own, *modules()) if thing.__name__ in defined_names(module)
            )


docstrings: dict[str, list[str]] = {}
"""As they were before the sections of Google's form were read."""


def drop_summary_of_constructor(
    app: Sphinx, what: str, name: str, thing: Any, options: object, lines: list[str]
) -> None:
    """Leave out the first paragraph of `__init__`, which would follow that of the class.

    The paragraph that Python writes for named tuples is left out as well.
    """
    if lines and lines[0].startswith("Create new instance of "):
        lines.clear()
    if what not in ("class", "exception") or "__init__" not in vars(thing):
        return
    # Sphinx gives the docstrings of the class and of `__init__` one by one.
    summary = (inspect.getdoc(thing.__init__) or "").partition("\n\n")[0].splitlines()
    if summary and lines[: len(summary)] == summary and thing.__doc__ != thing.__init__.__doc__:
        del lines[: len(summary)]


def mark_code(
    app: Sphinx, what: str, name: str, thing: object, options: object, lines: list[str]
) -> None:
    """Show indented text as it is below a colon that ends no heading of a section."""
    docstrings[name] = lines[:]
    for number, (line, empty, below) in enumerate(zip(lines, lines[1:], lines[2:], strict=False)):
        deeper = len(below) - len(below.lstrip()) > len(line) - len(line.lstrip())
        if line.endswith(":") and not empty.strip() and deeper:
            lines[number] = f"{line}:"


def keep_attribute(
    app: Sphinx, what: str, name: str, thing: object, options: object, lines: list[str]
) -> None:
    """Restore an attribute's text: Google's form takes what is before a colon for its type."""
    if what in ("attribute", "property"):
        lines[:] = docstrings[name]


def show_constants(
    app: Sphinx,
    what: str,
    name: str,
    thing: Any,
    options: object,
    signature: str | None,
    returns: str | None,
) -> tuple[str, str | None] | None:
    """Show the value of a default that is a constant, where the source has its name."""
    names = inspect.unwrap(thing).__globals__ if inspect.isfunction(thing) else {}
    names = names or (
        vars(sys.modules[thing.__module__]) if signature and hasattr(thing, "__module__") else {}
    )

    def value(match: re.Match[str]) -> str:
        return repr(names.get(match[0], match[0]))

    shown = re.sub(r"(?<== )[A-Z][A-Z_]+\b", value, signature or "")

    def keywords(match: re.Match[str]) -> str:
        spelled_out = options_of(names.get(match[1]))
        return f"*, {', '.join(spelled_out)}" if spelled_out else match[0]

    shown = re.sub(r"\*\*\w+: [\w.~]*Unpack\[[\w.~]*\b(\w+)\]", keywords, shown)
    # autodoc shows the repr of an alias that is part of a union.
    shown = re.sub(r"TypeAliasForwardRef\('(\w+)'\)", r"\1", shown)
    return (shown, returns) if shown != signature and signature else None


def options_of(kind: Any) -> list[str]:
    """Return the keyword arguments that a `TypedDict` stands for; none if it is not at hand."""
    annotations = getattr(kind, "__annotations__", {})
    texts = {
        name: str(getattr(annotation, "__forward_arg__", annotation))
        for name, annotation in annotations.items()
    }
    return [f"{name}: {text} = ..." for name, text in texts.items()]


def show_public_bases(
    app: Sphinx, name: str, cls: type[Any], options: object, bases: list[type[Any]]
) -> None:
    """Name those bases that have an entry."""
    bases[:] = public_bases(cls)


def hide_constructor(
    app: Sphinx,
    what: str,
    name: str,
    thing: Any,
    options: object,
    signature: str | None,
    returns: str | None,
) -> tuple[str, None] | None:
    """Show no parameters of what users do not make."""
    hidden = what in ("class", "exception") and is_constructor_hidden(thing)
    return ("", None) if hidden and signature else None


def skip_member(
    app: Sphinx, what: str, name: str, thing: Any, skip: bool, options: object
) -> bool | None:
    """Leave out methods that say nothing else than those that they override."""
    text = thing.__doc__ or ""
    return (
        True
        if text.startswith("Alias for field number") or (inspect.isroutine(thing) and not text)
        else None
    )


# -- links from names to entries


def refer_to_names(app: Sphinx, doctree: nodes.document) -> None:
    """Refer from each literal to the class or member that it may name, once in each section."""
    seen: set[tuple[int, str]] = set()
    for literal in list(doctree.findall(nodes.literal)):
        name = re.sub(r"^ah\.", "aiohooks.", literal.astext()).removesuffix("()")
        above: list[nodes.Node] = []
        while (node := above[-1].parent if above else literal.parent) is not None:
            above.append(node)
        section = next(
            (id(node) for node in above if isinstance(node, nodes.section | addnodes.desc)), 0
        )
        linked = any(
            isinstance(node, nodes.reference | nodes.title | addnodes.pending_xref)
            for node in above
        )
        if (
            not linked
            and (section, name) not in seen
            and re.fullmatch(r"aiohooks\.[\w.]+|([a-z_]+\.)?[A-Z]\w+(\.\w+)?", name)
        ):
            seen.add((section, name))
            reference = addnodes.pending_xref(
                "", refdomain="py", reftype="obj", reftarget=name, refdoc=app.env.docname
            )
            literal.replace_self(reference)
            reference += literal


def resolve_name(
    app: Sphinx, env: Any, node: addnodes.pending_xref, content: nodes.TextElement
) -> nodes.Node | None:
    """Refer to the one object whose path ends in the name."""
    if node.get("refdomain") != "py":
        return None
    # Without the aliases: a class is registered under the path of its definition, too.
    objects = {path: each for path, each in env.domains["py"].objects.items() if not each.aliased}
    name = node["reftarget"].removeprefix("aiohooks.").removesuffix("()")
    paths = endings(frozenset(objects)).get(name, set())
    if len(paths) != 1:
        return None
    (path,) = paths
    return make_refnode(
        app.builder, node["refdoc"], objects[path].docname, objects[path].node_id, content, path
    )


@functools.cache
def endings(paths: frozenset[str]) -> dict[str, set[str]]:
    """Return the paths that end in each name."""
    found: dict[str, set[str]] = defaultdict(set)
    for path in paths:
        parts = path.split(".")
        for start in range(len(parts)):
            found[".".join(parts[start:])].add(path)
    return found


# -- pages


def linkcode_resolve(domain: str, info: dict[str, str]) -> str | None:
    """Return the address of the source of an object."""
    thing: Any = sys.modules.get(info["module"])
    for name in info["fullname"].split("."):
        thing = getattr(thing, name, None)
    thing = inspect.unwrap(thing.fget if isinstance(thing, property) and thing.fget else thing)
    try:
        file, (lines, first) = inspect.getsourcefile(thing), inspect.getsourcelines(thing)
    except (TypeError, OSError):  # an attribute
        return None
    if file is None or not os.path.realpath(file).startswith(str(ROOT)):
        return None
    path = os.path.relpath(os.path.realpath(file), ROOT)
    return f"{REPOSITORY}/blob/main/{path}#L{first}-L{first + len(lines) - 1}"


def let_names_break(app: Sphinx, doctree: nodes.document, page: str) -> None:
    """Let long names in tables and titles break behind their parts, so that they fit the page."""
    for title in doctree.findall(nodes.title):
        if re.fullmatch(r"\w+(\.\w+)+", name := title.astext()):
            title.children = []
            for part in re.findall(r"\w+\.?", name):
                title += [nodes.Text(part), nodes.raw("", "<wbr>", format="html")]
    for cell in doctree.findall(nodes.entry):
        for literal in cell.findall(nodes.literal):
            if len(text := literal.astext()) > 16:
                literal.children = []
                for part in re.findall(r".{4,}?(?:_|/|\.|::|\(|=|, ?|$)|.+$", text):
                    literal += [nodes.Text(part), nodes.raw("", "<wbr>", format="html")]


def fold_navigation(
    app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: nodes.document | None
) -> None:
    """Fold the navigation's parts that the page is not in; on the first page all but one."""
    before, *parts = re.split(
        r'<p class="caption"[^>]*><span class="caption-text">(.*?)</span></p>',
        context["furo_navigation_tree"],
    )
    folded = [before]
    for number, (caption, pages) in enumerate(zip(parts[::2], parts[1::2], strict=True)):
        is_open = "current-page" in pages or (page == "index" and number == 0)
        folded.append(
            f"<details{' open' * is_open}><summary>{caption}</summary>{pages}</details>"
        )
    context["furo_navigation_tree"] = "".join(folded)


def describe_first_page(
    app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: nodes.document | None
) -> None:
    """Describe the first page as the package index does, and not by its first words."""
    if page == "index":
        context["metatags"] += f'<meta name="description" content="{DESCRIPTION}" />'
