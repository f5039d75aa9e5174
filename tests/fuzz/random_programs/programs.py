"""A random program: hooks, operations and callers, each with a script of what it does.

A script is a tuple of actions; an action may hold scripts of its own. What a program does is decided by its seed alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from random import Random
from typing import Any

PHASES = ("begin", "after_create_session", "before_run", "after_run", "end", "close")
MEMBER_METHODS = ("__aenter__", "notify", "ask", "__aexit__")
OPERATIONS = ("a", "b", "train", "raw", "replace")
ERRORS = ("plain", "recoverable", "clean end", "takes no note", "group")


@dataclasses.dataclass(frozen=True, slots=True)
class Action:
    """One action; what `n`, `m` and the scripts mean depends on its kind, see `Execution`."""

    kind: str
    n: int = 0
    m: int = 0
    scripts: tuple[Script, ...] = ()

    def lines(self, indent: str) -> Iterator[str]:
        """Describe it."""
        text = f"{self.kind} {ERRORS[self.n]} {self.m or ''}" if self.kind == "fail" else f"{self.kind} {self.n} {self.m}"
        yield indent + text.rstrip()
        for number, script in enumerate(self.scripts):
            yield f"{indent}  | {number}" + ("" if script else " nothing")
            for action in script:
                yield from action.lines(indent + "  |   ")


Script = tuple[Action, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class HookSpec:
    """One hook and the scripts of the methods that it overrides."""

    methods: tuple[tuple[str, Script], ...]
    order: int = 0
    timeout: int | None = None
    on_error: Any = "raise"
    fetches: bool = False
    background: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """The methods that it overrides."""
        return tuple(name for name, _ in self.methods)

    def lines(self, what: str) -> Iterator[str]:
        """Describe it."""
        flags = [name for name in ("fetches", "background") if getattr(self, name)]
        yield f"{what}: order={self.order} timeout={self.timeout} {self.on_error} {' '.join(flags)}".rstrip()
        for name, script in self.methods:
            yield f"  {name}"
            for action in script:
                yield from action.lines("    ")


@dataclasses.dataclass(frozen=True, slots=True)
class Program:
    """A session with hooks, and the tasks that use it; the first caller enters and leaves it."""

    callers: tuple[Script, ...]
    hooks: tuple[HookSpec, ...] = ()
    members: tuple[HookSpec, ...] = ()
    """The hooks of a group of another lifecycle, which scripts call."""
    operations: tuple[Script, ...] = ((), (), (), (), ())
    cancels: tuple[tuple[int, int], ...] = ()
    """Ticks, and the caller that is cancelled then."""
    events: tuple[int, ...] = (20, 30, 40)
    """When each event is set at the latest."""
    graph: bool = True
    """A graph with four operations; otherwise a step function."""
    recovers: bool = True
    joins: bool = True
    """Whether the first caller waits for the others before it leaves the session."""

    def kinds(self) -> set[str]:
        """Return the kinds of its actions; `fail` with its kind of error."""
        hooks = [*self.hooks, *self.members]
        scripts = [*self.callers, *self.operations, *(script for hook in hooks for _, script in hook.methods)]
        found: set[str] = set()
        while scripts:
            for action in scripts.pop():
                found.add(f"fail {ERRORS[action.n]}" if action.kind == "fail" else action.kind)
                scripts += action.scripts
        return found

    def __str__(self) -> str:
        kind = "graph" if self.graph else "step function"
        lines = [f"{kind}, {'recovers' if self.recovers else 'never recovers'}, events {self.events}, cancels {self.cancels}"]
        for number, hook in enumerate(self.hooks):
            lines += hook.lines(f"hook {number}")
        for number, hook in enumerate(self.members):
            lines += hook.lines(f"member {number}")
        for name, script in zip(OPERATIONS, self.operations, strict=True):
            if script:
                lines += [f"operation {name}", *(line for action in script for line in action.lines("    "))]
        for number, script in enumerate(self.callers):
            joins = "" if number or len(self.callers) == 1 or self.joins else ", does not wait for the others"
            lines += [f"caller {number}{joins}", *(line for action in script for line in action.lines("    "))]
        return "\n".join(lines)


# -- generating

WAITS = ("turns", "turns", "turns", "wait", "event", "set")
NESTED = ("group", "timeout", "scope", "anyio_group", "gather", "finally", "catch", "wait_for", "shield", "cleanup")
IN_HOOKS = ("until", "background", "stop", "cancelled", "third_party", "stale", "swallow", "raw", "raw", "session")


class Generator:
    """Makes programs; `trouble` is how often a script fails or does something rare."""

    def __init__(self, seed: str) -> None:
        self.random = Random(seed)
        self.trouble = self.random.choice((0.0, 0.05, 0.15, 0.3))

    def program(self) -> Program:
        """Return a program."""
        random = self.random
        graph = random.random() < 0.7
        others = [(Action("turns", random.randrange(6)), *self.body()) for _ in range(random.choice((0, 0, 0, 1, 2)))]
        callers = (self.body(), *others)
        count = random.choice((0, 0, 1, 1, 2))
        cancels = tuple((random.randrange(1, 40), random.randrange(len(callers))) for _ in range(count))
        return Program(
            callers=callers,
            hooks=tuple(self.hook() for _ in range(random.choice((0, 1, 2, 2, 3, 3, 4, 5)))),
            members=tuple(self.member() for _ in range(random.choice((0, 0, 1, 2, 3)))),
            operations=tuple(self.script("op", chance=0.5) for _ in OPERATIONS),
            cancels=cancels,
            events=tuple(random.randrange(1, 40) for _ in range(3)),
            graph=graph,
            recovers=random.random() < 0.7,
            joins=random.random() < 0.7,
        )

    def hook(self) -> HookSpec:
        random = self.random
        chances = (0.25, 0.25, 0.7, 0.6, 0.3, 0.4)
        return HookSpec(
            tuple((phase, self.script(phase)) for phase, chance in zip(PHASES, chances, strict=True) if random.random() < chance),
            order=random.choice((0, 0, 0, 0, 1, -1)),
            timeout=random.choice((None, None, None, random.randrange(1, 12))),
            on_error=random.choice(("raise", "raise", "raise", "log")),
            fetches=random.random() < 0.4,
            background=random.random() < 0.15,
        )

    def member(self) -> HookSpec:
        random = self.random
        names = [name for name in MEMBER_METHODS[1:3] if random.random() < 0.8] or ["notify"]
        if random.random() < 0.3:
            names = ["__aenter__", *names, "__aexit__"]
        hook = self.hook()
        methods = tuple((name, self.script("member", chance=0.6)) for name in names)
        return dataclasses.replace(hook, methods=methods, fetches=False)

    def body(self) -> Script:
        """Return what a caller does inside the block."""
        random = self.random
        actions: list[Action] = []
        for _ in range(random.randrange(1, 4)):
            kind = random.choice(
                ("run", "run", "run", "run", "run", "step_fn", "script", "script", "background", "until", "call")
            )
            if kind == "run":
                actions.append(Action("run", random.randrange(3)))
            elif kind == "call":
                actions.append(Action("call", random.randrange(2)))
            elif kind == "step_fn":
                inner = [Action("hooked", random.randrange(3)) for _ in range(random.randrange(3))]
                if len(inner) > 1 and random.random() < 0.5:
                    inner = [Action("together", scripts=((), *((one,) for one in inner)))]
                actions.append(Action("step_fn", scripts=((*inner, *self.script("step_fn", depth=1)),)))
            elif kind in ("background", "until"):
                actions.append(Action(kind, scripts=(self.script("task"),)))
            else:
                actions += self.script("body")
            if actions and random.random() < self.trouble:
                wrapped = random.choice(("catch", "timeout", "scope", "group"))
                last = (actions[-1],)
                scripts = ((), last) if wrapped == "group" and random.random() < 0.5 else (last,)
                actions[-1:] = [Action(wrapped, random.randrange(1, 15), 1, scripts)]
        if random.random() < self.trouble / 3:
            actions.append(Action("aclose"))
        return tuple(actions)

    def script(self, place: str, depth: int = 0, chance: float = 0.8) -> Script:
        """Return what a method does."""
        random = self.random
        if random.random() > chance:
            return ()
        return tuple(self.action(place, depth) for _ in range(random.choice((0, 1, 1, 2, 3) if depth < 2 else (0, 1, 1))))

    def action(self, place: str, depth: int) -> Action:
        random = self.random
        if random.random() < self.trouble:
            error = random.choice((0, 0, 0, 1, 1, 1, 2, 3, 4))
            # A recoverable one is not raised for good: recovery continues as long as there are runs between.
            return Action("fail", error, random.choice((1, 1, 2, 4) if error == 1 else (0, 1, 1, 2)))
        if depth < 3 and random.random() < 0.1 + self.trouble:
            return self.nested(random.choice(NESTED), place, depth + 1)
        if place != "member" and random.random() < 0.05:
            return Action("call", random.randrange(2))
        if place not in ("body", "step_fn", "task") and random.random() < self.trouble / 2:
            return self.in_hook(place, depth + 1)
        if place in ("body", "task", "step_fn") and random.random() < self.trouble / 2:
            kind = random.choice(("until", "stop", "background"))
            return Action(kind, scripts=(self.script(place, depth + 1),) if kind != "stop" else ())
        return Action(random.choice(WAITS), random.choice((1, 1, 1, 2, 3, 5, 8)))

    def nested(self, kind: str, place: str, depth: int) -> Action:
        random = self.random
        single = ("timeout", "scope", "catch", "wait_for", "shield", "cleanup")
        scripts = 1 if kind in single else 2 if kind == "finally" else random.randrange(1, 4)
        n, m = random.randrange(1, 10), random.randrange(2)
        return Action(kind, n, m, tuple(self.script(place, depth) for _ in range(scripts)))

    def in_hook(self, place: str, depth: int) -> Action:
        random = self.random
        kind = random.choice(IN_HOOKS)
        if kind in ("cancelled", "third_party", "stale") or (kind == "stop" and place != "member"):
            return Action(kind)
        if kind == "swallow":
            return Action(kind, scripts=(self.script(place, depth),))
        if place in ("end", "close", "member") or (place == "op" and kind == "raw") or (kind == "session" and depth > 2):
            return Action("turns", 2)
        if kind == "raw":
            return Action(kind, random.choice((0, 1, 2, 2))) if place != "begin" else Action("turns", 1)
        if kind == "session":
            return Action(kind, scripts=tuple(self.script("inner", depth) for _ in range(4)))
        return Action(kind, scripts=(self.script("task", depth),))


def generate(seed: int, number: int) -> Program:
    """Return program `number` of a seed."""
    return Generator(f"{seed}/{number}").program()


# -- making smaller


def smaller(program: Program) -> Iterator[Program]:
    """Return programs with one part less, the largest parts first."""
    replace = dataclasses.replace
    changed: Any
    for name in ("hooks", "members"):
        hooks: tuple[HookSpec, ...] = getattr(program, name)
        for number in range(len(hooks)):
            changed = {name: _without(hooks, number)}
            yield replace(program, **changed)
    for number in range(1, len(program.callers)):
        kept = tuple((tick, who - (who > number)) for tick, who in program.cancels if who != number)
        yield replace(program, callers=_without(program.callers, number), cancels=kept)
    for number in range(len(program.cancels)):
        yield replace(program, cancels=_without(program.cancels, number))
    for name in ("hooks", "members"):
        hooks = getattr(program, name)
        for number, hook in enumerate(hooks):
            for one in _smaller_hooks(hook):
                changed = {name: _with(hooks, number, one)}
                yield replace(program, **changed)
    for name in ("operations", "callers"):
        scripts: tuple[Script, ...] = getattr(program, name)
        for number, script in enumerate(scripts):
            for shorter in smaller_scripts(script):
                changed = {name: _with(scripts, number, shorter)}
                yield replace(program, **changed)
    for changes in ({"graph": False}, {"recovers": False}, {"joins": True}):
        if replace(program, **changes) != program:
            yield replace(program, **changes)
    for number, (tick, who) in enumerate(program.cancels):
        if tick > 1:
            yield replace(program, cancels=_with(program.cancels, number, (tick - 1, who)))


def _smaller_hooks(hook: HookSpec) -> Iterator[HookSpec]:
    replace = dataclasses.replace
    for number, (name, script) in enumerate(hook.methods):
        if not name.startswith("__"):  # those come in pairs
            yield replace(hook, methods=_without(hook.methods, number))
        for shorter in smaller_scripts(script):
            yield replace(hook, methods=_with(hook.methods, number, (name, shorter)))
    changed: Any
    for changed in ({"order": 0}, {"timeout": None}, {"on_error": "raise"}, {"fetches": False}, {"background": False}):
        if replace(hook, **changed) != hook:
            yield replace(hook, **changed)


def smaller_scripts(script: Script) -> Iterator[Script]:
    """Return scripts with an action less, with the contents of one in its place, or with a smaller number."""
    for number, action in enumerate(script):
        yield _without(script, number)
        for inner in action.scripts:
            yield (*script[:number], *inner, *script[number + 1 :])
        for at, inner in enumerate(action.scripts):
            if action.kind in ("group", "together", "anyio_group", "gather") and len(action.scripts) > 1:
                yield _with(script, number, dataclasses.replace(action, scripts=_without(action.scripts, at)))
            for shorter in smaller_scripts(inner):
                yield _with(script, number, dataclasses.replace(action, scripts=_with(action.scripts, at, shorter)))
        if action.n > 1 and action.kind != "fail":
            yield _with(script, number, dataclasses.replace(action, n=action.n - 1))
        elif action.kind == "fail" and action.n:
            yield _with(script, number, dataclasses.replace(action, n=0))


def _without(items: tuple[Any, ...], number: int) -> tuple[Any, ...]:
    return (*items[:number], *items[number + 1 :])


def _with(items: tuple[Any, ...], number: int, item: Any) -> tuple[Any, ...]:
    return (*items[:number], item, *items[number + 1 :])
