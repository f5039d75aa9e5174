"""Cancel at every suspension, once and twice.

    python -m tests.fuzz.cancel_sweep --points 100000 --double 30000 --loop both

Every scenario is run in each of nine wrappers and cancelled at its k-th suspension, for all k: the operation's task or the
task that suspends, while it is suspended or as it wakes, directly or in the wrapper's own way; then at k and again at k + d.
Rounds with other seeds (other hooks suspend, more or less often) follow until the counts are reached. The counts are per event
loop. Fails on any violation, and if fewer points were run than asked for.
"""

from __future__ import annotations

import argparse
import itertools
import platform
import random
import re
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context

from tests.fuzz.cancel_sweep.probe import Cancel
from tests.fuzz.cancel_sweep.runner import Plan, Result, Runner, Scenario
from tests.fuzz.cancel_sweep.wrappers import WRAPPERS, Bare

FARTHEST = 12
"""The second cancel comes at most so many suspensions after the first."""
MOST_SHOWN = 25


@dataclass(frozen=True, slots=True)
class Violation:
    """One violation, and the plan that reproduces it."""

    scenario: str
    plan: str
    what: str


@dataclass(slots=True)
class Tally:
    """The points run and the violations found on one loop."""

    loop: str
    suspensions: Counter[str] = field(default_factory=Counter)
    single: Counter[str] = field(default_factory=Counter)
    double: Counter[str] = field(default_factory=Counter)
    bad: Counter[str] = field(default_factory=Counter)
    violations: list[Violation] = field(default_factory=list)
    secs: float = 0.0

    def count(self, result: Result) -> None:
        """Add one result."""
        name = result.plan.scenario.name
        if result.delivered >= 2:
            self.double[name] += 1
        elif result.delivered == 1 and len(result.plan.cancels) == 1:
            self.single[name] += 1
        if result.violations:
            self.bad[name] += 1
            self.violations += [Violation(name, str(result.plan), one) for one in result.violations]

    def add(self, other: Tally) -> None:
        """Add the tally of another process."""
        self.suspensions |= other.suspensions
        self.single += other.single
        self.double += other.double
        self.bad += other.bad
        self.violations += other.violations


def sweep(
    scenarios: Sequence[Scenario],
    *,
    points: int,
    double: int,
    loop: str = "asyncio",
    seed: int = 0,
    most_bad: int = 200,
    most_hangs: int = 5,
) -> Tally:
    """Run so many points and tally the violations; stop early when too many are bad, or hang."""
    tally = Tally(loop)
    began = time.perf_counter()
    with Runner(loop, most_hangs) as runner:
        for number in itertools.count():
            baselines = list(runner.run(Plan(scenario, seed + number, Bare, ()) for scenario in scenarios))
            for result in baselines:
                tally.count(result)
                tally.suspensions[result.plan.scenario.name] = result.suspensions
            order = random.Random(seed + number)
            hits = _run_plans(runner, _shuffled(_singles(baselines), order), points, tally.single, tally, most_bad)
            _run_plans(runner, _shuffled(_doubles(hits), order), double, tally.double, tally, most_bad)
            enough = tally.single.total() >= points and tally.double.total() >= double
            # If no cancel could be delivered in a round, none ever will.
            fruitless = not tally.single and not tally.double
            if enough or fruitless or len(tally.violations) >= most_bad or runner.has_given_up:
                break
    tally.secs = time.perf_counter() - began
    return tally


def _shuffled(plans: Iterable[Plan], order: random.Random) -> list[Plan]:
    """Return the plans in random order, a few of each scenario before the others: a small count leaves no scenario out."""
    shuffled = list(plans)
    order.shuffle(shuffled)
    first, rest, known = list[Plan](), list[Plan](), Counter[str]()
    for plan in shuffled:
        known[plan.scenario.name] += 1
        (first if known[plan.scenario.name] <= _FIRST else rest).append(plan)
    return first + rest


_FIRST = 4  # not every cancel is delivered


def _run_plans(runner: Runner, plans: list[Plan], asked: int, counter: Counter[str], tally: Tally, most_bad: int) -> list[Result]:
    """Run plans until so many had all their cancels delivered, and return those."""
    hits: list[Result] = []
    position = 0
    while position < len(plans) and counter.total() < asked and len(tally.violations) < most_bad and not runner.has_given_up:
        some = plans[position : position + asked - counter.total()]
        position += len(some)
        for result in runner.run(some):
            tally.count(result)
            if result.delivered == len(result.plan.cancels):
                hits.append(result)
    return hits


def _singles(baselines: Iterable[Result]) -> Iterator[Plan]:
    """Yield every way to cancel once."""
    for result in baselines:
        for wrapper in WRAPPERS:
            for at in range(1, result.suspensions + 1):
                for cancel in _ways_to_cancel(at, at in result.in_children, wrapper is not Bare):
                    yield Plan(result.plan.scenario, result.plan.seed, wrapper, (cancel,))


def _doubles(singles: Iterable[Result]) -> Iterator[Plan]:
    """Yield every way to cancel again, at each suspension that the operation reaches after the first cancel."""
    for result in singles:
        (first,) = result.plan.cancels
        for at in range(first.at + 1, min(result.suspensions, first.at + FARTHEST) + 1):
            for second in _ways_to_cancel(at, False, result.plan.wrapper is not Bare):
                yield Plan(result.plan.scenario, result.plan.seed, result.plan.wrapper, (first, second))


def _ways_to_cancel(at: int, in_child: bool, wrapped: bool) -> Iterator[Cancel]:
    for timing in ("suspended", "waking"):
        yield Cancel(at, "root", timing)
        if in_child:
            yield Cancel(at, "self", timing)
        if wrapped:
            yield Cancel(at, "root", timing, "own")


def sweep_in_processes(names: Sequence[str], *, points: int, double: int, loop: str, seed: int, jobs: int) -> Tally:
    """Distribute the scenarios of these names to processes; each has its own seeds, so that no point is run twice."""
    tally = Tally(loop)
    began = time.perf_counter()
    shares = [(names, -(-points // jobs), -(-double // jobs), loop, seed + 1000 * job) for job in range(jobs)]
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        for part in pool.map(_share, shares):
            tally.add(part)
    tally.secs = time.perf_counter() - began
    return tally


def _share(share: tuple[Sequence[str], int, int, str, int]) -> Tally:
    names, points, double, loop, seed = share
    return sweep(_named(names), points=points, double=double, loop=loop, seed=seed)


def _named(names: Iterable[str]) -> list[Scenario]:
    from tests.fuzz.cancel_sweep.scenarios import SCENARIOS

    wanted = set(names)
    return [one for one in SCENARIOS if one.name in wanted]


def table(tally: Tally) -> str:
    """Format one row a scenario, and the sum."""
    lines = [f"{'scenario':56} {'suspends':>8} {'points':>8} {'double':>8} {'violations':>10}"]
    for name in tally.suspensions:
        row = (tally.suspensions[name], tally.single[name], tally.double[name], tally.bad[name])
        lines.append(f"{name:56} {row[0]:8} {row[1]:8} {row[2]:8} {row[3]:10}")
    single, double = tally.single.total(), tally.double.total()
    rate = (single + double) / tally.secs if tally.secs else 0
    lines.append(f"{'sum':56} {'':8} {single:8} {double:8} {tally.bad.total():10}")
    lines.append(f"Python {platform.python_version()}, {tally.loop}: {tally.secs:.1f} s, {rate:.0f} points/s")
    return "\n".join(lines)


def report(tally: Tally) -> str:
    """Format the violations, each kind once, with plans that can be run again."""
    kinds: dict[str, list[Violation]] = {}
    for violation in tally.violations:
        kinds.setdefault(re.sub(r"[0-9]+", "#", violation.what), []).append(violation)
    lines: list[str] = []
    for several in sorted(kinds.values(), key=len, reverse=True)[:MOST_SHOWN]:
        lines.append(f"{len(several)} x {several[0].what}")
        scenarios = Counter(one.scenario for one in several)
        lines.append(f"    in {', '.join(f'{name} ({count})' for name, count in scenarios.most_common(6))}")
        lines += [f"    {one.plan}" for one in several[:3]]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command, and return its exit status."""
    from tests.fuzz.cancel_sweep.scenarios import SCENARIOS

    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.cancel_sweep", description=__doc__)
    parser.add_argument("--points", type=int, default=100_000, help="cancels once, per loop (default %(default)s)")
    parser.add_argument("--double", type=int, default=30_000, help="cancels twice, per loop (default %(default)s)")
    parser.add_argument("--loop", choices=("asyncio", "uvloop", "both"), default="both")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scenario", help="only scenarios whose name contains this")
    parser.add_argument("--jobs", type=int, default=1, help="number of processes (default %(default)s)")
    options = parser.parse_args(arguments)
    names = [one.name for one in SCENARIOS if options.scenario is None or options.scenario in one.name]
    if not names:
        parser.error(f"no scenario contains {options.scenario!r}; there are: {', '.join(one.name for one in SCENARIOS)}")
    if options.jobs < 1:
        parser.error("--jobs is at least 1")

    failed = False
    for loop in ("asyncio", "uvloop") if options.loop == "both" else (options.loop,):
        if options.jobs == 1:
            tally = sweep(_named(names), points=options.points, double=options.double, loop=loop, seed=options.seed)
        else:
            tally = sweep_in_processes(
                names, points=options.points, double=options.double, loop=loop, seed=options.seed, jobs=options.jobs
            )
        print(table(tally), flush=True)
        if tally.violations:
            print(report(tally), flush=True)
        short = tally.single.total() < options.points or tally.double.total() < options.double
        if short:
            print(f"fewer points than asked for on {loop}", flush=True)
        failed = failed or short or bool(tally.violations)
    return int(failed)
