"""A random program: hooks, operations and callers, each with a script of what it does.

A script is a tuple of actions; an action may hold scripts of its own. All is chosen by the schedule
of the exploration, with names of their own for the parts, so that a program becomes smaller as its
choices are left out.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from aiohooks.testing import choose

PHASES = ("begin", "after_create_session", "before_run", "after_run", "end", "close")
OPERATIONS = ("a", "b", "train", "raw", "replace")
CALLS = ("notify", "ask", "change", "around")
"""The calls of the group."""
ERRORS = ("plain", "recoverable", "clean end", "takes no note", "group")


@dataclasses.dataclass(frozen=True, slots=True)
class Action:
    """One action; what `n`, `m` and the scripts mean depends on its kind, see `Execution`."""

    kind: str
    n: int = 0
    m: int = 0
    scripts: tuple[Script, ...] = ()


Script = tuple[Action, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class HookSpec:
    """One hook and the scripts of the methods that it overrides."""

    methods: tuple[tuple[str, Script], ...]
    order: int = 0
    timeout: float | None = None
    on_error: Any = "raise"
    fetches: bool = False
    background: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """The methods that it overrides."""
        return tuple(name for name, _ in self.methods)


@dataclasses.dataclass(frozen=True, slots=True)
class Program:
    """A session with hooks, and the tasks that use it; the first caller enters and leaves it."""

    callers: tuple[Script, ...]
    hooks: tuple[HookSpec, ...] = ()
    members: tuple[HookSpec, ...] = ()
    """The hooks of a group of another lifecycle, which scripts call."""
    operations: tuple[Script, ...] = ((), (), (), (), ())
    events: tuple[int, ...] = (4, 6, 9)
    """When each event is set at the latest."""
    graph: bool = True
    """A graph with five operations; otherwise a step function."""
    recovers: bool = True
    joins: bool = True
    """Whether the first caller waits for the others before it leaves the session."""


WAITS = ("turns", "turns", "wait", "event", "set")
NESTED = (
    "group",
    "timeout",
    "scope",
    "anyio_group",
    "gather",
    "finally",
    "catch",
    "wait_for",
    "shield",
    "cleanup",
)
IN_HOOKS = (
    "until",
    "background",
    "stop",
    "cancelled",
    "third_party",
    "stale",
    "swallow",
    "raw",
    "session",
)
IN_BODIES = ("until", "stop", "background")
BODIES = ("body", "task", "step_fn")


def draw() -> Program:
    """Draw a program."""
    callers = [
        _body("caller 0"),
        *(_other(f"caller {number}") for number in range(1, choose(1, 2, 3, name="callers"))),
    ]
    return Program(
        callers=tuple(callers),
        hooks=tuple(
            _hook(f"hook {number}") for number in range(choose(2, 0, 1, 3, 4, name="hooks"))
        ),
        members=tuple(
            _member(f"member {number}") for number in range(choose(2, 0, 0, 3, name="members"))
        ),
        operations=tuple(_Drawn(f"operation {name}").script("op") for name in OPERATIONS),
        graph=choose(True, True, False, name="graph"),
        recovers=choose(True, True, False, name="recovers"),
        joins=choose(True, True, False, name="joins"),
    )


def draw_with_group() -> Program:
    """Draw a program whose callers mostly call the group."""
    members = range(choose(2, 3, 4, name="members"))
    callers = range(choose(1, 2, name="callers"))
    return Program(
        callers=tuple(_calls(f"caller {number}") for number in callers),
        members=tuple(_member(f"member {number}") for number in members),
        graph=False,
        joins=choose(True, True, False, name="joins"),
    )


def _calls(name: str) -> Script:
    """Draw the calls of the group that a caller makes, some of them at the same time."""
    drawn = _Drawn(name)
    actions: list[Action] = []
    for _ in range(drawn(2, 1, 3)):
        calls = [Action("call", drawn(2, 3, 3, 0, 1)) for _ in range(drawn(1, 1, 2))]
        actions += drawn.script("body", 1)
        actions.append(Action("together", 3, 1, scripts=((), *((call,) for call in calls))))
        wrapped = drawn("", "", "catch", "timeout", "scope")
        if wrapped:
            actions[-1:] = [Action(wrapped, drawn(3, 1, 2, 6), 1, ((actions[-1],),))]
    return tuple(actions)


def _hook(name: str) -> HookSpec:
    drawn = _Drawn(name)
    usual = ("before_run", "after_run")
    phases = [one for one in PHASES if drawn(*(True, False) if one in usual else (False, True))]
    return drawn.spec(
        [(phase, _Drawn(f"{name}.{phase}").script(phase)) for phase in phases],
        fetches=drawn(False, True),
    )


def _member(name: str) -> HookSpec:
    drawn = _Drawn(name)
    names = drawn(
        CALLS,
        ("notify", "ask", "around"),
        ("change", "around"),
        ("notify", "change"),
        ("__aenter__", "notify", "ask", "__aexit__"),
        ("ask", "change", "around"),
    )
    return drawn.spec([(one, _Drawn(f"{name}.{one}").script("member")) for one in names])


def _other(name: str) -> Script:
    return (Action("turns", _Drawn(f"{name} begins")(0, 1, 2, 4)), *_body(name))


def _body(name: str) -> Script:
    """Draw what a caller does inside the block."""
    drawn, actions = _Drawn(name), list[Action]()
    for _ in range(drawn(2, 1, 3)):
        kind = drawn(
            "run", "run", "run", "step_fn", "script", "background", "until", "call", "call"
        )
        if kind == "script":
            actions += drawn.script("body")
        elif kind == "step_fn":
            inner = [Action("hooked", drawn(0, 1, 2)) for _ in range(drawn(1, 0, 2))]
            if len(inner) > 1 and drawn(True, False):
                inner = [Action("together", scripts=((), *((one,) for one in inner)))]
            actions.append(Action("step_fn", scripts=((*inner, *drawn.script("step_fn", 1)),)))
        elif kind in ("background", "until"):
            actions.append(Action(kind, scripts=(drawn.script("task"),)))
        else:
            actions.append(Action(kind, drawn(0, 1, 2) if kind == "run" else drawn(3, 2, 0, 1)))
        wrapped = drawn("", "", "", "catch", "timeout", "scope", "group")
        if wrapped and actions:
            last = (actions[-1],)
            scripts = ((), last) if wrapped == "group" and drawn(False, True) else (last,)
            actions[-1:] = [Action(wrapped, drawn(3, 1, 2, 6, 9), 1, scripts)]
    if drawn(False, False, False, False, True):
        actions.append(Action("aclose"))
    return tuple(actions)


class _Drawn:
    """Draws the parts of one thing, whose name they have."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, first: Any, *others: Any) -> Any:
        return choose(first, *others, name=self.name)

    def spec(self, methods: list[tuple[str, Script]], *, fetches: bool = False) -> HookSpec:
        order = self(0, 0, 1, -1)
        timeout = self(None, None, 1, 3, 9)
        if "around" in dict(methods):
            timeout = None  # a hook that wraps others has none
        return HookSpec(
            tuple(methods),
            order=order,
            timeout=timeout,
            on_error=self("raise", "raise", "log"),
            fetches=fetches,
            background=self(False, False, False, True),
        )

    def script(self, place: str, depth: int = 0) -> Script:
        """Draw what a method does."""
        counts = (1, 0, 2, 3) if depth == 0 else (1, 0, 2) if depth < 2 else (0, 1)
        return tuple(self.action(place, depth) for _ in range(self(*counts)))

    def action(self, place: str, depth: int) -> Action:
        special = IN_BODIES if place in BODIES else () if depth > 2 else IN_HOOKS
        nested = NESTED if depth < 3 else ()
        kind = self(
            *WAITS,
            *WAITS,
            *nested,
            "fail",
            "fail",
            "fail",
            *special,
            *(() if place == "member" else ("call",)),
        )
        if kind == "fail":
            error = self(0, 0, 1, 1, 2, 3, 4)
            # A recoverable one is not raised for good: recovery continues as long as there are runs
            # between.
            return Action("fail", error, self(1, 2, 4) if error == 1 else self(0, 1, 2))
        if kind in NESTED:
            single = ("timeout", "scope", "catch", "wait_for", "shield", "cleanup")
            scripts = 1 if kind in single else 2 if kind == "finally" else self(2, 1, 3)
            return Action(
                kind,
                self(1, 2, 4, 9),
                self(0, 1),
                tuple(self.script(place, depth + 1) for _ in range(scripts)),
            )
        if kind in special:
            return self._special(kind, place, depth + 1)
        return Action(kind, self(3, 2, 0, 1) if kind == "call" else self(1, 2, 3, 5, 8))

    def _special(self, kind: str, place: str, depth: int) -> Action:
        if kind in ("cancelled", "third_party", "stale") or (kind == "stop" and place != "member"):
            return Action(kind)
        if kind == "swallow":
            return Action(kind, scripts=(self.script(place, depth),))
        if place in ("end", "close", "member") or (place == "op" and kind == "raw"):
            return Action("turns", 2)
        if kind == "raw":
            return Action(kind, self(2, 0, 1)) if place != "begin" else Action("turns", 1)
        if kind == "session":
            return Action(kind, scripts=tuple(self.script("inner", depth) for _ in range(4)))
        return Action(kind, scripts=(self.script("task", depth),))
