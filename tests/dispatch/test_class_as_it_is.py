"""A class of a framework as it is: its `__init__`, its data, what is set on the composite, the
methods that it leaves out.
"""

from __future__ import annotations

import abc
import dataclasses
import enum
from typing import Any, ClassVar, Generic, Protocol, TypeVar, runtime_checkable

import pydantic
import pytest

import aiohooks as ah
from aiohooks.errors import InvalidHookError
from tests.support.checks import refused

T = TypeVar("T")


class Hook:
    """It derives from none of the classes."""

    title = "hook"

    def __init__(self) -> None:
        self.calls = 0

    async def on(self) -> None:
        self.calls += 1


class Untitled:
    async def on(self) -> None: ...


# -- __init__


class Registering:
    """A class that calls a method of its own, and registers itself, when it is made."""

    registered: ClassVar[list[object]] = []
    called: ClassVar[list[str]] = []

    def __init__(self, where: str) -> None:
        self.where = where
        self.set_up()
        self.registered.append(self)

    def set_up(self) -> None:
        self.called.append("own")

    async def on(self) -> None: ...


class Listening(Registering):
    def set_up(self) -> None:
        self.called.append("hook")


async def test_init_runs_once_before_the_hooks_are_there() -> None:
    """What `__init__` calls is the class's own, and the composite has what it sets; afterwards the
    hooks are called.
    """
    hooks = [Listening("a"), Listening("b")]
    Registering.registered.clear()
    Registering.called.clear()
    composite = ah.compose(Registering, hooks, init={"where": "group"})
    assert composite.where == "group"
    assert Registering.registered == [composite]
    assert Registering.called == ["own"]
    composite.set_up()
    assert Registering.called == ["own", "hook", "hook"]


class Wants:
    def __init__(self, app: str, *, port: int) -> None:
        raise AttributeError("a port")

    async def on(self) -> None: ...


# -- kinds of classes


class On:
    __slots__ = ()

    async def on(self) -> None: ...


class Abstract(abc.ABC):
    @abc.abstractmethod
    async def on(self) -> None: ...

    @abc.abstractmethod
    async def of_no_hook(self) -> None: ...


class Plain(Protocol):
    async def on(self) -> None: ...


class WithData(Protocol):
    title: str

    async def on(self) -> None: ...


@runtime_checkable
class CheckedWithData(WithData, Protocol): ...


@dataclasses.dataclass
class Data(On):
    number: int = 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Frozen(On):
    number: int


class Model(On, pydantic.BaseModel):
    number: int


class Member(On, enum.Enum):
    ONE = 1


class Keyed(On):
    def __init_subclass__(cls, *, key: str, **others: Any) -> None:
        super().__init_subclass__(**others)


class Closing(type):
    def __new__(cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any]) -> Any:
        if bases != (On,):
            raise AttributeError("no more classes")
        return super().__new__(cls, name, bases, namespace)


class Closed(On, metaclass=Closing): ...


class Single(type):
    objects: ClassVar[dict[type, object]] = {}

    def __call__(cls, *args: Any, **keywords: Any) -> Any:
        return Single.objects.setdefault(cls, super().__call__(*args, **keywords))


class Once(On, metaclass=Single): ...


class Typed(On, Generic[T]): ...


SLOTS = type("Slots", (On,), {"__slots__": ("number",)})


@pytest.mark.parametrize(
    ("kind", "init"),
    [
        (Abstract, None),
        (Plain, None),
        (WithData, None),
        (CheckedWithData, None),
        (Data, None),
        (Data, {"number": 2}),
        (Frozen, {"number": 2}),
        (Typed, None),
        (Typed[int], None),
        (SLOTS, None),
        (Model, {"number": 2}),
        (Once, None),
        (Keyed, None),
    ],
)
async def test_any_class_is_a_lifecycle(kind: Any, init: dict[str, Any] | None) -> None:
    """It has an object with the data that was given, and its methods call the hooks."""
    hooks = [Hook(), Hook()]
    composite = ah.compose(kind, hooks, init=init)
    await composite.on()
    assert [hook.calls for hook in hooks] == [1, 1]
    for name, value in (init or {}).items():
        assert getattr(composite, name) == value


@pytest.mark.parametrize(
    ("kind", "init", "words"),
    [
        (Frozen, None, ("Frozen", "'number'", "give what it needs as init=")),
        (Wants, {"app": "x"}, ("'port'", "give what it needs as init=")),
        (
            Wants,
            {"app": "x", "port": -1},
            ("failed with init={'app': 'x', 'port': -1}: AttributeError('a port')",),
        ),
        (Wants, [1], ("failed with init=[1]", "must be a mapping")),
        (Model, None, ("Model", "number", "Field required", "give what it needs")),
        (Model, {"number": "x"}, ("Model", "init={'number': 'x'}", "valid integer")),
        (Member, None, ("Member cannot be a hook interface", "derive one that can")),
        (Closed, None, ("Closed", "no more classes", "derive one that can")),
        (int, None, ("int has no public methods",)),
        (object, None, ("object has no public methods",)),
        (5, None, ("5 is not a class",)),
    ],
)
def test_other_classes_are_refused(kind: Any, init: Any, words: tuple[str, ...]) -> None:
    """Each by its name, with what to do, and never with an error that is not of this library; so
    is what `init` lacks, and what it fails with.
    """
    with refused(InvalidHookError, *words):
        ah.compose(kind, [Hook()], init=init)


def test_the_data_of_a_protocol_is_that_of_the_hooks() -> None:
    """Hooks that have all of a protocol are objects of it: what it only declares is theirs, or is
    given by `init`.
    """
    other = Hook()
    other.title = "other"
    for kind in (WithData, CheckedWithData):
        assert ah.compose(kind, [Hook(), other]).title == "hook"
        assert ah.compose(kind, [other, Hook()]).title == "other"
        composite: Any = ah.compose(kind, [Untitled()])
        with pytest.raises(AttributeError, match="title"):
            _ = composite.title
        composite.title = "group"
        assert composite.title == "group"


# -- what is set on the composite


class Middleware:
    broker: Any = None
    level: int
    __slots__ = ("__dict__", "_seen", "level")

    def set_broker(self, broker: object) -> None:
        self.broker = broker

    @property
    def seen(self) -> list[object]:
        return self._seen

    @seen.setter
    def seen(self, value: list[object]) -> None:
        self._seen = value

    async def on(self) -> None: ...


class Using(Middleware):
    async def on(self) -> None: ...


def test_what_is_set_on_the_composite_reaches_the_hooks_of_its_class() -> None:
    """Those that there are, also by a method of the class; a property that can be set is the
    object's own, and calls the setters of the hooks.
    """
    first = Using()
    foreign = Hook()
    later = Using()
    group = ah.HookGroup(Middleware, [first, foreign])
    group.hooks.set_broker("broker")
    group.hooks.level = 3
    group.add(later)
    assert (first.broker, group.hooks.broker, later.broker) == ("broker", "broker", None)
    assert (first.level, group.hooks.level) == (3, 3)
    assert not hasattr(foreign, "broker")
    group.hooks.seen = ["seen"]
    assert group.hooks.seen == first.seen == ["seen"]


# -- what a composite takes over from its hooks beside their methods


class Lifecycle:
    """A framework's class: it has an attribute, a property that hooks may override, and one that
    looks at the class.
    """

    strict: bool = False

    @property
    def quiet(self) -> bool:
        return False

    @property
    def has_second(self) -> bool:
        return type(self).second is not Lifecycle.second

    @property
    def outdated(self) -> bool:
        raise AssertionError("this property is not to be read")

    async def first(self) -> None: ...

    async def second(self) -> None: ...


class First(Lifecycle):
    async def first(self) -> None: ...


class Both(First):
    async def second(self) -> None: ...


def test_a_property_that_looks_at_the_class_speaks_of_all_hooks() -> None:
    """A property that no hook overrides is not read from the hooks: on the composite it says what
    holds for all of them.
    """
    assert not ah.compose(Lifecycle, [First(), First()]).has_second
    assert ah.compose(Lifecycle, [First(), Both()]).has_second


def test_attributes_that_hooks_set_are_taken_over() -> None:
    """An attribute is taken over whether the class of a hook sets it or the hook itself, and a
    property as well.
    """

    class Strict(First):
        strict = True
        quiet = True

    other = Strict()
    hook = First()
    hook.strict = True
    assert ah.compose(Lifecycle, [hook]).strict
    composite = ah.compose(Lifecycle, [other, Strict()])
    assert (composite.strict, composite.quiet) == (True, True)
    # Of the class itself, they are what they are in the class of the framework.
    assert type(composite).strict is False
    assert type(composite).quiet is Lifecycle.quiet
