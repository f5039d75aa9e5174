"""Show which tests add nothing: `python -m tests.fuzz.mutants.arbiter tests/graph --module
aiohooks/graph/`.

Runs every test that reaches a fault of a fixed sample, also after the first that fails. Prints the
tests that kill each fault; then, for each test function, how many faults it kills and how many only
it kills. Test functions that could go are listed last: the others kill all of the sample without
them. A small sample lists tests of laws that none of its faults breaks: these stay. With `--keep`
other tests, such as models, are run as well and are never listed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

from tests.fuzz._harness import command
from tests.fuzz.mutants.__main__ import chosen, tried
from tests.fuzz.mutants.changes import Mutant
from tests.fuzz.mutants.equivalent import EQUIVALENT

Kills = dict[Mutant, set[str]]
"""The test functions that each fault fails."""


def function_of(test: str) -> str:
    """Return the function of a test, without its parameters."""
    return test.removesuffix(" hangs").partition("[")[0]


def removable(kills: Kills, kept: Iterable[str]) -> list[str]:
    """Return test functions without which the others still kill all that is killed.

    A function that kills fewer faults goes before one that kills more.
    """
    counts = {test: 0 for tests in kills.values() for test in tests}
    for tests in kills.values():
        for test in tests:
            counts[test] += 1
    remaining = {fault: set(tests) for fault, tests in kills.items() if tests}
    removed: list[str] = []
    for test in sorted(counts, key=lambda test: (counts[test], test)):
        is_kept = any(test.startswith(prefix) for prefix in kept)
        if is_kept or any(tests == {test} for tests in remaining.values()):
            continue
        removed.append(test)
        for tests in remaining.values():
            tests.discard(test)
    return removed


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = command("mutants.arbiter", __doc__, count=100)
    parser.add_argument("tests", nargs="+", help="the tests that are judged")
    parser.add_argument("--module", nargs="+", required=True, help="modules, or folders of them")
    parser.add_argument("--keep", nargs="*", default=(), help="tests that stay")
    parser.add_argument("--hang-secs", type=float, default=20)
    options = parser.parse_args(arguments)
    faults = [
        fault
        for fault in chosen(options.module, "", options.count, options.seed)
        if (fault.module, fault.function, fault.change) not in EQUIVALENT
    ]
    kills: Kills = {}
    tests = (*options.tests, *options.keep)
    for fault, _, killers in tried(faults, tests, options.hang_secs, every_test=True):
        if fault is not None:
            kills[fault] = {function_of(test) for test in killers.splitlines()}
            print(f"{fault}: {', '.join(sorted(kills[fault])) or 'survived'}", flush=True)
    functions = sorted({test for killers in kills.values() for test in killers})
    for test in functions:
        killed = [killers for killers in kills.values() if test in killers]
        alone = sum(len(killers) == 1 for killers in killed)
        print(f"{test}: kills {len(killed)}, {alone} of them alone")
    print(f"killed {sum(map(bool, kills.values()))} of {len(kills)}; could go:")
    for test in removable(kills, options.keep):
        print(f"  {test}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
