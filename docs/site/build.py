"""Build the site from the pages of docs/ with Sphinx, and check it.

    python -m docs.site.build FOLDER

builds it; `FOLDER/index.html` is its first page. Sphinx, its theme and its reader of Markdown are
the extra `docs`.

A link of a page to a file outside of docs/ works in the repository. On the site it leads to a page
with that file.
"""

from __future__ import annotations

import argparse
import ast
import functools
import html
import importlib
import inspect
import itertools
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import types
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohooks as ah
from docs.site.checks import problems
from tests.support.source import ROOT, imports, modules, tree
from tests.support.stand_ins import stand_ins
from tests.support.versions import PROJECT

DOCS = ROOT / "docs"
REPOSITORY, SITE, DESCRIPTION = (
    PROJECT["urls"]["Homepage"],
    PROJECT["urls"]["Documentation"],
    PROJECT["description"],
)
# The public packages and modules, by the page of the API reference that has their names, in reading
# order.
API_PAGES = {
    "session": ("aiohooks.session", "aiohooks.training"),
    "dispatch": ("aiohooks.dispatch",),
    "graph": ("aiohooks.graph",),
    "hooks": ("aiohooks.hooks",),
    "checkpoint": ("aiohooks.checkpoint",),
    "stores": tuple(f"aiohooks.stores{each}" for each in ("", ".local", ".redis", ".ray")),
    "version_gate": ("aiohooks.version_gate",),
    "distributed": (
        "aiohooks.distributed",
        "aiohooks.distributed.local",
        "aiohooks.distributed.ray",
    ),
    "adapters.asgi": ("aiohooks.adapters.asgi",),
    "adapters.opentelemetry": ("aiohooks.adapters.opentelemetry",),
    "adapters.prometheus": ("aiohooks.adapters.prometheus",),
    "adapters.trackers": tuple(
        f"aiohooks.adapters.trackers{each}" for each in ("", ".mlflow", ".wandb", ".tensorboard")
    ),
    "adapters.tensorflow": ("aiohooks.adapters.tensorflow",),
    "testing": ("aiohooks.testing",),
    "aiohooks": ("aiohooks",),
    "errors": ("aiohooks.errors",),
}
PACKAGES = tuple(package for packages in API_PAGES.values() for package in packages)
# Pages of the repository's root that the site has; README.md is not among them, for the first page
# says the same.
ROOT_PAGES = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
NAVIGATION: dict[str, dict[str, str]] = tomllib.loads(
    (DOCS / "site" / "navigation.toml").read_text(encoding="utf-8")
)
"""The pages by part of the navigation, each with what a reader finds there."""
LINK = re.compile(r"(?<=\]\()(?P<target>[^)\s#]*)(?P<anchor>#[^)\s]*)?(?=[^)]*\))")


# -- the API reference


@functools.cache
def packages() -> dict[str, types.ModuleType]:
    """Import the public packages; TensorFlow, if it is not installed, has a stand-in."""
    with stand_ins():
        return {package: importlib.import_module(package) for package in PACKAGES}


@functools.cache
def entries() -> dict[str, dict[str, Any]]:
    """Return the public objects of each package by their import path.

    Each object is in one package, the one that it is defined in, also if it is imported from
    `aiohooks`.
    """
    defined_in = {one.name: one.module for one in imports("aiohooks") if one.name is not None}
    found: dict[str, dict[str, Any]] = {package: {} for package in PACKAGES}
    for name in ah.__all__:
        getattr(ah, name)  # which gives each its public path
    for package, module in packages().items():
        for name in getattr(module, "__all__", ()):
            thing = getattr(module, name)
            if inspect.isclass(thing) or inspect.isfunction(thing):
                home = package if package != "aiohooks" else package_of(defined_in[name])
                found[home][f"{thing.__module__}.{name}"] = thing
    return {package: dict(sorted(things.items(), key=_order)) for package, things in found.items()}


def _order(item: tuple[str, Any]) -> tuple[bool, bool, int, str]:
    # First the base of all errors; then what most programs use: what `aiohooks` has itself, and the
    # pages name most.
    path, name = item[0], item[0].rpartition(".")[2]
    often = 0 if path.startswith("aiohooks.errors.") else _mentions()[name]
    return name != "AiohooksError", path != f"aiohooks.{name}", -often, name.lower()


@functools.cache
def _mentions() -> Counter[str]:
    text = "".join(page.read_text(encoding="utf-8") for page in DOCS.rglob("*.md"))
    return Counter(re.findall(r"(?:ah\.|`)(\w+)", text))


def package_of(module: str) -> str:
    """Return the public package that a module belongs to: `aiohooks` for those in none of the
    others.
    """
    return max((package for package in PACKAGES if f"{module}.".startswith(f"{package}.")), key=len)


def api_page(name: str) -> str:
    """Return the source of one page of the API reference."""
    lines: list[str] = []
    for number, package in enumerate(API_PAGES[name]):
        words, _, rest = (inspect.getdoc(packages()[package]) or "").partition("\n\n")
        lines += [
            package,
            ("-" if number else "=") * len(package),
            "",
            f".. py:module:: {package}",
            "",
            words,
            "",
        ]
        if package == "aiohooks.errors":  # whose docstring draws the tree
            lines += ["::", "", rest, ""]
        for path, thing in entries()[package].items():
            lines += [*_directive(path, thing), ""]
    return "\n".join(lines)


def _directive(path: str, thing: Any) -> Iterator[str]:
    if not inspect.isclass(thing):
        yield f".. autofunction:: {path}"
        return
    yield f".. auto{'exception' if issubclass(thing, BaseException) else 'class'}:: {path}"
    yield "   :members:"
    if not issubclass(thing, BaseException) and public_bases(thing):
        yield "   :show-inheritance:"
    # The members of bases that have no entry of their own are shown here.
    private = [
        base
        for base in thing.__mro__[1:]
        if base.__module__.startswith("aiohooks.") and base not in documented()
    ]
    if private:
        yield (
            "   :inherited-members:"
            f" {', '.join(base.__name__ for base in thing.__mro__[1:] if base not in private)}"
        )


@functools.cache
def documented() -> frozenset[Any]:
    """Return all objects with an entry."""
    return frozenset(thing for things in entries().values() for thing in things.values())


def public_bases(cls: type[Any]) -> list[type[Any]]:
    """Return the bases of a class that have an entry."""
    return [base for base in cls.__bases__ if base in documented()]


def is_constructor_hidden(thing: Any) -> bool:
    """Return whether users do not call it: protocols, errors, and classes whose docstring names
    their creator.
    """
    made = re.search(
        r"\b(made|created|returned) by\b|\bcreates? it\b",
        inspect.getdoc(thing) or "",
        flags=re.IGNORECASE,
    )
    return inspect.isclass(thing) and bool(
        made or issubclass(thing, BaseException) or getattr(thing, "_is_protocol", False)
    )


@functools.cache
def attribute_docstrings() -> tuple[tuple[str, str, str], ...]:
    """Return the docstrings below what the classes of the library and their methods assign: class,
    attribute, text.
    """
    return tuple(
        (owner.name, ast.unparse(target).removeprefix("self."), below.value.value)
        for path in modules().values()
        for owner in tree(path).body
        if isinstance(owner, ast.ClassDef)
        for body in (
            owner.body,
            *(node.body for node in owner.body if isinstance(node, ast.FunctionDef)),
        )
        for above, below in itertools.pairwise(body)
        if isinstance(above, ast.Assign | ast.AnnAssign)
        and isinstance(below, ast.Expr)
        and isinstance(below.value, ast.Constant)
        for target in (above.targets if isinstance(above, ast.Assign) else [above.target])
        if isinstance(below.value.value, str)
    )


# -- the other pages


def write_sources(folder: Path) -> None:
    """Write what Sphinx reads: the pages, those that they link to outside of docs/, and the API
    reference.
    """
    waiting = [*DOCS.rglob("*.md"), *(ROOT / name for name in ROOT_PAGES)]
    written: set[Path] = set()
    while waiting:
        page = waiting.pop()
        if page in written or page == ROOT / "README.md":
            continue
        written.add(page)
        place = folder / place_of(page)
        place.parent.mkdir(parents=True, exist_ok=True)
        if page.suffix in (".png", ".svg"):
            shutil.copy(page, place)
        else:
            text, targets = with_links(
                page, with_drawings(page, with_tabs(with_cards(text_of(page))))
            )
            place.write_text(text + contents_of(page, text), encoding="utf-8")
            waiting += targets
    for name in API_PAGES:
        place = folder / "reference" / "api" / f"{name}.rst"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(api_page(name), encoding="utf-8")


def write_for_models(sources: Path, folder: Path) -> None:
    """Put the Markdown of each page beside it, and the list of the pages as `llms.txt`:
    https://llmstxt.org.
    """
    for page in sources.rglob("*.md"):
        if "source" not in page.relative_to(sources).parts:
            shutil.copy(page, folder / page.relative_to(sources))
    lines = [f"# aiohooks\n\n> {DESCRIPTION}\n"]
    for caption, pages in NAVIGATION.items():
        lines.append(f"\n## {caption}\n\n")
        for name, text in pages.items():
            lines.append(f"- [{title_of(DOCS / name)}]({SITE}{name}): {text}\n")
    lines.append("\n## Project\n\n")
    lines += [f"- [{title_of(ROOT / name)}]({SITE}project/{name.lower()})\n" for name in ROOT_PAGES]
    (folder / "llms.txt").write_text("".join(lines), encoding="utf-8")


def title_of(page: Path) -> str:
    """Return the heading of a page."""
    return page.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")


def place_of(path: Path) -> Path:
    """Return where the site has the page of a file or folder of the repository."""
    if path.is_relative_to(DOCS):
        return path.relative_to(DOCS)
    if path == ROOT / "README.md":
        return Path("index.md")
    if path.parent == ROOT and path.name in ROOT_PAGES:
        return Path("project", path.name.lower())
    place = Path("source", path.relative_to(ROOT))
    return place / "index.md" if path.is_dir() else place.with_name(f"{path.name}.md")


def text_of(path: Path) -> str:
    """Return a page's text; for a folder its files, for another file the whole of it."""
    orphan = "---\norphan: true\n---\n\n"
    if path.suffix == ".md":
        is_in_no_list = place_of(path).parts[0] in ("source", "design")
        text = path.read_text(encoding="utf-8")
        return orphan + text if is_in_no_list else text
    title = f"{orphan}# {path.relative_to(ROOT)}\n\n"
    if path.is_dir():
        return title + "".join(
            f"- [{each.name}]({each.name})\n" for each in sorted(path.glob("[!_]*.py"))
        )
    return f"{title}```python\n{path.read_text(encoding='utf-8')}```\n"


def with_links(page: Path, text: str) -> tuple[str, list[Path]]:
    """Return the text with its links as the site needs them, and the files that they name."""
    targets: list[Path] = []

    def as_on_the_site(match: re.Match[str]) -> str:
        if re.match(r"[a-z]+:", match["target"]) or not match["target"]:
            return match[0]
        target = (page.parent if page.is_file() else page).joinpath(match["target"]).resolve()
        targets.append(target)
        return os.path.relpath(place_of(target), place_of(page).parent) + (match["anchor"] or "")

    parts = re.split(r"(^ *```.*?^ *```$)", text, flags=re.MULTILINE | re.DOTALL)
    return (
        "".join(
            part if number % 2 else LINK.sub(as_on_the_site, part)
            for number, part in enumerate(parts)
        ),
        targets,
    )


def with_drawings(page: Path, text: str) -> str:
    """Return the text with its SVG pictures as part of the page, whose colors they take then."""

    def as_figure(match: re.Match[str]) -> str:
        svg = (page.parent / match["file"]).resolve().read_text(encoding="utf-8")
        svg = re.sub(r"\n\s*\n", "\n", svg[svg.index("<svg") :])  # an empty line would end the HTML
        alternative = html.escape(" ".join(match["alternative"].split()), quote=True)
        return f'<figure class="drawing" aria-label="{alternative}">{svg.strip()}</figure>'

    return re.sub(r"!\[(?P<alternative>[^\]]*)\]\((?P<file>[^)]+\.svg)\)", as_figure, text)


def with_tabs(text: str) -> str:
    """Return the text with a tab for each bold line between the marks of tabs; in the repository
    they are read one by one.
    """

    def as_tabs(match: re.Match[str]) -> str:
        _, *parts = re.split(r"^\*\*(.+)\*\*$", match[1], flags=re.MULTILINE)
        tabs = [
            f":::{{tab-item}} {name}\n{body.strip()}\n:::\n"
            for name, body in zip(parts[::2], parts[1::2], strict=True)
        ]
        return f"::::{{tab-set}}\n{''.join(tabs)}::::"

    return re.sub(
        r"^<!-- tabs -->$(.*?)^<!-- end of tabs -->$",
        as_tabs,
        text,
        flags=re.MULTILINE | re.DOTALL,
    )


def with_cards(text: str) -> str:
    """Return the text with a card for each link of the list between the marks of cards."""

    def as_cards(match: re.Match[str]) -> str:
        cards = [
            f":::{{grid-item-card}} [{title}]({target})\n{body.strip()}\n:::\n"
            for title, target, body in re.findall(
                r"^- \[([^\]]+)\]\(([^)]+)\): (.+?)(?=^- |\Z)", match[1], re.MULTILINE | re.DOTALL
            )
        ]
        return f"::::{{grid}} 1 2 2 3\n:gutter: 2\n\n{''.join(cards)}::::"

    return re.sub(
        r"^<!-- cards -->$(.*?)^<!-- end of cards -->$",
        as_cards,
        text,
        flags=re.MULTILINE | re.DOTALL,
    )


def contents_of(page: Path, text: str) -> str:
    """Return the directives that put the pages below this one into the navigation."""
    if page == DOCS / "reference" / "api.md":
        return toctree("", [f"{name} <api/{name}>" for name in API_PAGES])
    if page == DOCS / "index.md":
        contents = [
            toctree(caption, [name.removesuffix(".md") for name in pages])
            for caption, pages in NAVIGATION.items()
        ]
        project = [f"project/{name.removesuffix('.md').lower()}" for name in ROOT_PAGES]
        return "".join([*contents, toctree("Project", project)])
    return ""


def toctree(caption: str, pages: list[str]) -> str:
    """Return the directive for a part of the navigation."""
    return "\n".join(
        [
            "",
            "```{toctree}",
            ":hidden:",
            *([f":caption: {caption}"] if caption else []),
            "",
            *pages,
            "```",
            "",
        ]
    )


def build(folder: Path, *, inventories: bool = False) -> int:
    """Build the site; return the exit code. Warnings are errors."""
    environment = os.environ | ({"AIOHOOKS_SITE_INVENTORIES": "1"} if inventories else {})
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])
    shutil.rmtree(folder, ignore_errors=True)
    with tempfile.TemporaryDirectory() as work:
        sources = Path(work, "sources")
        write_sources(sources)
        sphinx = [
            sys.executable,
            "-m",
            "sphinx",
            "--fail-on-warning",
            "--keep-going",
            "--quiet",
            "-E",
        ]
        command = [*sphinx, "-d", f"{work}/doctrees", "-c", str(DOCS), str(sources), str(folder)]
        code = subprocess.run(command, env=environment, check=False).returncode
        if code == 0:
            write_for_models(sources, folder)
        return code


def missing_entries(folder: Path) -> list[str]:
    """Return what the built pages lack: entries of public names, and links from names in backticks
    to them.
    """
    ids: set[str] = set()
    linked: set[str] = set()
    for page in folder.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        ids |= set(re.findall(r'<dt [^>]*id="(aiohooks\.[^"]+)"', text))
        linked |= set(
            re.findall(r'href="[^"#]+#(aiohooks\.[^"]+)"[^>]*><code class="docutils', text)
        )
    missing = [
        f"{path} has no entry"
        for things in entries().values()
        for path in things
        if path not in ids
    ]
    # All but a few are named on some page; it is enough to know that links are made for those that
    # every reader meets.
    usual = (
        "aiohooks.AsyncMonitoredSession",
        "aiohooks.HookGroup",
        "aiohooks.SessionRunHook",
        "aiohooks.StepStore",
    )
    return missing + [f"no page links to {path}" for path in usual if path not in linked]


def main() -> int:
    """Build the site and check it."""
    parser = argparse.ArgumentParser(
        prog="python -m docs.site.build", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("folder", type=Path, help="where the site is written")
    parser.add_argument(
        "--inventories",
        action="store_true",
        help="link to the documentation of Python, anyio and torch",
    )
    options = parser.parse_args()
    code = build(options.folder, inventories=options.inventories)
    wrong = problems(options.folder) + missing_entries(options.folder) if code == 0 else []
    print(*wrong, sep="\n", end="\n" * bool(wrong))
    return code or bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
