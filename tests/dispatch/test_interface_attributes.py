"""What a composite takes over from its hooks beside their methods."""

from __future__ import annotations

import aiohooks as ah


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
