"""The command that makes small faults in the library: a few of them in every test run.

Many are a command: `python -m tests.fuzz.mutants --count 500`.
"""

from __future__ import annotations

import pytest

from tests.fuzz.mutants.__main__ import MODULES, all_faults, main
from tests.fuzz.mutants.arbiter import removable
from tests.fuzz.mutants.changes import Mutant, mutants
from tests.fuzz.mutants.equivalent import EQUIVALENT
from tests.fuzz.mutants.trials import is_possible

POLICIES = ["--module", "aiohooks/checkpoint/policies.py", "--match"]
KEEP_EITHER = [*POLICIES, "KeepPolicy.__or__"]

SOURCE = '''
class Name:
    """Says 1."""
    size: int = 1

    def __repr__(self) -> str:
        return str(1)

    @property
    def place(self) -> "int | 1":
        """Return 1."""
        x = 0
        if self.size < 2 and ready:
            raise ValueError(f"{1} is wrong")
        while self.size:
            x += 1
            _logger.warning("%s", 1)
            break
        return find(self, x)

async def done(group: Name) -> None:
    await group.close(True)
'''


def changes(source: str) -> list[str]:
    """Return the faults of a text as text."""
    return [str(fault) for fault in mutants("m.py", source)]


def test_every_kind_of_fault_is_made_and_texts_are_left_alone() -> None:
    """Docstrings, annotations, `__repr__` and the texts of errors and log records do not change."""
    place, done = "Name.place: ", "done: await group.close(True)  =>  "
    assert changes(SOURCE) == [
        f"m.py:{line} {change}"
        for line, change in [
            (12, f"{place}x = 0  =>  pass"),
            (12, f"{place}x = 0  =>  x = 1"),
            (13, f"{place}if self.size < 2 and ready:  =>  if (not (self.size < 2 and ready)):"),
            (13, f"{place}if self.size < 2 and ready:  =>  if (self.size < 2 or ready):"),
            (13, f"{place}if self.size < 2 and ready:  =>  if (self.size >= 2) and ready:"),
            (13, f"{place}if self.size < 2 and ready:  =>  if (self.size <= 2) and ready:"),
            (13, f"{place}if self.size < 2 and ready:  =>  if self.size < 3 and ready:"),
            (14, f'{place}raise ValueError(f"{{1}} is wrong")  =>  pass'),
            (15, f"{place}while self.size:  =>  while (not (self.size)):"),
            (16, f"{place}x += 1  =>  pass"),
            (16, f"{place}x += 1  =>  x += 2"),
            (17, f'{place}_logger.warning("%s", 1)  =>  pass'),
            (18, f"{place}break  =>  continue"),
            (19, f"{place}return find(self, x)  =>  return None"),
            (19, f"{place}return find(self, x)  =>  return find(x, self)"),
            (22, f"{done}pass"),
            (22, f"{done}await group.close(False)"),
        ]
    ]
    assert all(
        is_possible(fault, SOURCE) and fault.applied(SOURCE) != SOURCE
        for fault in mutants("m.py", SOURCE)
    )


def test_faults_are_killed_and_counted(capsys: pytest.CaptureFixture[str]) -> None:
    """Good tests kill all faults; those that are listed as equivalent are counted and not tried."""
    tests = "tests/checkpoint/test_policies.py::test_policies_are_combined"
    assert main([*KEEP_EITHER, "--tests", tests]) == 0
    printed = capsys.readouterr().out
    assert "survived:" not in printed
    assert "checkpoint\t2\t0\t1\n" in printed
    assert printed.endswith("100.0% of the faults that change behaviour are killed\n")


def test_what_is_listed_as_equivalent_is_a_fault_of_the_present_code() -> None:
    """An entry goes with the code that it is about."""
    present = {(fault.module, fault.function, fault.change) for fault in all_faults(MODULES)}
    assert EQUIVALENT.keys() <= present


def test_a_test_that_alone_kills_a_fault_stays() -> None:
    """Of tests that kill the same faults, the one that kills fewer can go; tests to keep stay."""
    first, second, third = [*mutants("module.py", SOURCE)][:3]
    kills: dict[Mutant, set[str]] = {first: {"a"}, second: {"a", "b"}, third: {"b", "c"}}
    assert removable(kills, []) == ["c"]
    assert removable(kills, ["c"]) == ["b"]
