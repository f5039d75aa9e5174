"""Signatures as a reference shows them: the types as they are written, defaults as one would write them."""

from __future__ import annotations

import dataclasses
import inspect
import re
from typing import Any

LONGEST_LINE = 100


def signature_text(thing: Any, *, bound: bool = False) -> str:
    """The parameters and the result of a function, or the parameters of a class; on several lines if it is long.

    `bound` leaves out the first parameter.
    """
    signature = inspect.signature(thing)
    parameters = list(signature.parameters.values())
    texts: list[str] = []
    seen: set[Any] = set()
    for parameter in parameters[1:] if bound else parameters:
        if parameter.kind is parameter.KEYWORD_ONLY and not seen & {parameter.KEYWORD_ONLY, parameter.VAR_POSITIONAL}:
            texts.append("*")
        if seen and parameter.POSITIONAL_ONLY in seen and parameter.kind is not parameter.POSITIONAL_ONLY and "/" not in texts:
            texts.append("/")
        seen.add(parameter.kind)
        texts.append(parameter_text(parameter))
    returns = signature.return_annotation
    result = "" if inspect.isclass(thing) or returns is signature.empty else f" -> {annotation_text(returns)}"
    line = f"({', '.join(texts)}){result}"
    return line if len(line) <= LONGEST_LINE else "(\n    " + ",\n    ".join(texts) + f",\n){result}"


def parameter_text(parameter: inspect.Parameter) -> str:
    """One parameter with its type and default."""
    stars = {"VAR_POSITIONAL": "*", "VAR_KEYWORD": "**"}.get(parameter.kind.name, "")
    text = stars + parameter.name
    if parameter.annotation is not parameter.empty:
        text += f": {annotation_text(parameter.annotation)}"
    if parameter.default is not parameter.empty:
        text += f" = {default_text(parameter.default)}"
    return text


def annotation_text(annotation: Any) -> str:
    """A type without the modules it comes from."""
    if annotation is inspect.Signature.empty:
        return "Any"
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    return re.sub(r"\b(?:[a-z_]+\.)+(?=[A-Z])", "", re.sub(r"ForwardRef\('(.*?)'\)", r"\1", text))


def default_text(default: Any) -> str:
    """A default as one would write it; `...` for one that only means "not given"."""
    if default is None or isinstance(default, bool | int | float | str):
        return repr(default)
    if isinstance(default, tuple):
        return f"({', '.join(one.__name__ if inspect.isclass(one) else repr(one) for one in default)})"
    if dataclasses.is_dataclass(default) and not isinstance(default, type):
        given = [
            f"{field.name}={getattr(default, field.name)!r}"
            for field in dataclasses.fields(default)
            if getattr(default, field.name) not in (field.default, ())
        ]
        return f"{type(default).__name__}({', '.join(given)})"
    return "..."
