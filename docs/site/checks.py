"""What is checked of a built site: links, headings, alternative texts, names of controls, contrast.

`problems(folder)` lists what is wrong. Nothing is fetched: links to other sites are not followed.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

SITE_PATH = "/aiohooks/"
"""Where the site is on its host."""
UNNAMED = ("hidden", "checkbox", "submit", "radio")
"""Fields without a name of their own, or with one in the label beside them."""
LEAST_CONTRAST = 4.5
"""Of text, by WCAG 2.1, level AA."""


@dataclass
class Page(HTMLParser):
    """What the checks need to know of a page."""

    html: str
    ids: list[str] = field(default_factory=list)
    links: list[str] = field(default_factory=list)
    headings: list[int] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    language: str | None = None
    title: str = ""

    def __post_init__(self) -> None:
        super().__init__()
        self._open: list[
            tuple[str, list[str]]
        ] = []  # links, buttons and the title that are open, with their texts
        self.feed(self.html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note what the tag has."""
        has = {name: value or "" for name, value in attrs}
        self.ids += [has["id"]] if "id" in has else []
        self.links += [has[name] for name in ("href", "src") if name in has]
        if re.fullmatch("h[1-6]", tag):
            self.headings.append(int(tag[1]))
        if tag == "html":
            self.language = has.get("lang")
        if tag == "img" and not has.get("alt", "").strip():
            self.problems.append(f"the picture {has.get('src')} has no alternative text")
        name = has.get("aria-label", has.get("title", has.get("alt", "")))
        if tag in ("a", "button", "title"):
            self._open.append((tag, [name]))
        elif self._open:
            self._open[-1][1].append(name)
        if (
            tag == "input"
            and has.get("type") not in UNNAMED
            and not (name or has.get("placeholder"))
        ):
            self.problems.append(f"the field {has.get('name')} has no name")

    def handle_data(self, data: str) -> None:
        """Add to the text of what is open."""
        if self._open:
            self._open[-1][1].append(data)

    def handle_endtag(self, tag: str) -> None:
        """Check the text of what ends."""
        if not self._open or self._open[-1][0] != tag:
            return
        text = "".join(self._open.pop()[1]).strip()
        if tag == "title":
            self.title = self.title or text  # pictures have titles, too
        elif not text:
            self.problems.append(f"a {'link' if tag == 'a' else 'button'} has no text")


def problems(folder: Path) -> list[str]:
    """Return what is wrong with a built site, one line each."""
    pages = {
        path: Page(path.read_text(encoding="utf-8")) for path in sorted(folder.rglob("*.html"))
    }
    found = [
        f"{path.relative_to(folder)}: {text}"
        for path, page in pages.items()
        for text in of_page(path, pages)
    ]
    return found + same_titles(pages.values()) + low_contrasts(folder / "_static")


def of_page(path: Path, pages: dict[Path, Page]) -> Iterator[str]:
    """Yield what is wrong with one page."""
    page = pages[path]
    yield from page.problems
    if not page.language:
        yield "the language is not given"
    if (
        page.headings.count(1) != 1 and path.name != "search.html"
    ):  # whose heading is written by its script
        yield f"{page.headings.count(1)} headings of the first level"
    for above, below in zip([0, *page.headings], page.headings, strict=False):
        if below > above + 1:
            yield f"a heading of level {below} below one of level {above}"
    for name, count in Counter(page.ids).items():
        if count > 1:
            yield f"the id {name} is there {count} times"
    for link in dict.fromkeys(page.links):
        parts = urlsplit(link)
        if parts.scheme or parts.netloc:
            continue
        # The page of what is not found has the addresses of the site, for it is shown at any other.
        inside = parts.path.removeprefix(SITE_PATH) if path.name == "404.html" else parts.path
        target = (path.parent / unquote(inside)).resolve() if inside else path
        if not target.is_file():
            yield f"the link {link} has no target"
        elif (
            parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].ids
        ):
            yield f"the link {link} has no target on its page"


def same_titles(pages: Iterable[Page]) -> list[str]:
    """Return the titles that several pages have, which tabs and results of a search would not tell
    apart.
    """
    titles = Counter(page.title for page in pages)
    return [
        f"{count} pages have the title {title!r}" for title, count in titles.items() if count > 1
    ]


# -- contrast


def low_contrasts(static: Path) -> list[str]:
    """Return the colors of texts that are hard to read on their background, in both modes."""
    theme = (static / "styles" / "furo.css").read_text(encoding="utf-8")
    light, _, dark = (
        (static / "pygments.css").read_text(encoding="utf-8").partition("@media not print")
    )
    light_colors = variables(theme, r"(?:^|[},])body\{")
    modes = {
        "light": (light_colors, light),
        "dark": (light_colors | variables(theme, r"body\[data-theme=dark\]\{"), dark),
    }
    found: list[str] = []
    for mode, (colors, code) in modes.items():
        background = color_of("--color-background-primary", colors)
        for name in (
            "foreground-primary",
            "foreground-secondary",
            "foreground-muted",
            "brand-content",
            "brand-primary",
            "link",
        ):
            found += _low(f"{mode}: {name}", color_of(f"--color-{name}", colors), background)
        block = re.search(r"\.highlight *\{[^}]*background: *(#\w+)", code)
        for selector, rule in re.findall(r"(\.highlight[^{},]*)\{([^}]*)\}", code):
            color, own = (
                re.search(r"(?<![\w-])color: *(#\w+)", rule),
                re.search(r"background-color: *(#\w+)", rule),
            )
            if color:
                found += _low(
                    f"{mode}: {selector.strip()}", color[1], (own or block or [background] * 2)[1]
                )
    return list(dict.fromkeys(found))


def variables(css: str, selector: str) -> dict[str, str]:
    """Return the variables that the rules of a selector set."""
    rules = re.findall(rf"{selector}([^}}]*)\}}", css)
    return {
        name: value for rule in rules for name, value in re.findall(r"(--[\w-]+): *([^;]+)", rule)
    }


def color_of(name: str, colors: dict[str, str]) -> str:
    """Return the color that a variable has in the end."""
    value = colors[name]
    reference = re.fullmatch(r"var\((--[\w-]+)\)", value)
    return color_of(reference[1], colors) if reference else value


def _low(what: str, color: str, background: str) -> Iterator[str]:
    ratio = contrast(color, background)
    if ratio < LEAST_CONTRAST:
        yield (
            f"{what}: the contrast of {color} on {background} is {ratio:.1f}, less than"
            f" {LEAST_CONTRAST}"
        )


def contrast(one: str, other: str) -> float:
    """Return the contrast ratio of two colors, from 1 to 21."""
    darker, lighter = sorted((luminance(one), luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


def luminance(color: str) -> float:
    """Return the relative luminance of a color, `#rgb` or `#rrggbb`."""
    digits = color.removeprefix("#")
    digits = "".join(digit * 2 for digit in digits) if len(digits) == 3 else digits
    shares = [int(digits[at : at + 2], 16) / 255 for at in (0, 2, 4)]
    linear = [
        share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4 for share in shares
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
