"""What a store and its actor say to each other, as bytes: Ray passes one such argument on as it is, and that is quick."""

from __future__ import annotations

import json
from typing import Any

from aiohooks.stores._mark import Mark
from aiohooks.stores._view import Answer, Departed, Fail, Failure, Join, Lead, Leave, Member, Request, View, Write

_REQUESTS: tuple[type[Request], ...] = (Write, Join, Leave, Lead, Fail)


def packed(*message: Any) -> bytes:
    """A message; names of tuples are left out."""
    return json.dumps(message, separators=(",", ":"), check_circular=False).encode()


def unpacked(message: bytes) -> list[Any]:
    """What was packed, with lists in place of tuples."""
    fields: list[Any] = json.loads(message)
    return fields


def kind_of(request: Request) -> int:
    """The kind of a request, which its fields do not say."""
    return _REQUESTS.index(type(request))


def request_of(kind: int, fields: Any) -> Request:
    """A request, unpacked."""
    if _REQUESTS[kind] is Write:
        name, amount, floor, reign, writer, seq = fields
        return Write(name, amount, Mark(*floor), reign, writer, seq)
    if _REQUESTS[kind] is Join:
        return Join(Member(*fields[0]))
    if _REQUESTS[kind] is Lead:
        return Lead(Member(*fields[0]))
    return Leave(*fields) if _REQUESTS[kind] is Leave else Fail(*fields)


def answer_of(fields: Any) -> Answer:
    """An answer, unpacked."""
    verdict, mark, reign, news = fields
    return Answer(verdict, Mark(*mark), reign, news)


def view_of(fields: Any) -> View:
    """A view, unpacked."""
    mark, reign, ready, news, members, departed, failure, expires_secs = fields
    return View(
        Mark(*mark),
        reign,
        ready,
        news,
        tuple(Member(*member) for member in members),
        None if departed is None else Departed(*departed),
        None if failure is None else Failure(failure[0], Mark(*failure[1])),
        expires_secs,
    )
