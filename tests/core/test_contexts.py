"""What calls set in their contexts is given back to the caller's."""

from __future__ import annotations

from contextvars import Context, ContextVar, copy_context

from aiohooks._core.calls import OwnContext, copy_back

FIRST: ContextVar[int] = ContextVar("FIRST")
SECOND: ContextVar[int] = ContextVar("SECOND")


def in_a_context(test: object) -> None:
    Context().run(test)  # type: ignore[arg-type]


def test_what_overlapping_calls_set_is_given_back_in_their_order() -> None:
    """The last one wins; what the caller itself has set meanwhile stays."""

    def check() -> None:
        base = copy_context()
        one, another = base.copy(), base.copy()
        another.run(FIRST.set, 2)
        one.run(FIRST.set, 1)
        one.run(SECOND.set, 1)
        SECOND.set(5)
        copy_back([(base, one), (base, another)])
        assert (FIRST.get(), SECOND.get()) == (2, 5)

    in_a_context(check)


def test_a_token_is_valid_in_the_next_call() -> None:
    """One context for several calls: what is reset in the second is unset for the caller."""

    def check() -> None:
        own = OwnContext()
        token = own.update().run(FIRST.set, 1)
        own.copy_back()
        assert FIRST.get() == 1
        own.update().run(FIRST.reset, token)
        own.copy_back()
        assert FIRST.get(None) is None

    in_a_context(check)


def test_what_a_later_call_has_set_in_the_callers_context_is_kept() -> None:
    """The last call wins, also over one with a context of its own that has ended after it."""

    def check() -> None:
        FIRST.set(0)
        before = copy_context()
        after = before.copy()
        after.run(FIRST.set, 1)
        FIRST.set(2)
        copy_back([(before, after)])
        assert FIRST.get() == 2

    in_a_context(check)
