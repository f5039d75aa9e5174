"""P1 and P2: cancel at every suspension, and twice.

    python -m tests.programmes.cancel_sweep --points 100000 --double 30000 --loop both

Every scenario is run in each of nine wrappers and cancelled at its k-th suspension, for all k: the operation's task or the
task that suspends, at the suspension or in the race with its result, directly or in the wrapper's own way; then at k and
again at k + d. Rounds with other seeds (other hooks suspend, more or less often) follow until the counts are reached.
The counts are per event loop. Fails on any violation, and if fewer points were fired than asked for.
"""

from __future__ import annotations

import argparse
import itertools
import platform
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from tests.programmes.driver import Shot
from tests.programmes.engine import Plan, Range, Scenario, Verdict, baseline
from tests.programmes.wrappers import WRAPPERS, Bare

FARTHEST = 12
"""The second cancel comes at most so many suspensions after the first."""
MOST_SHOWN = 25


@dataclass(slots=True)
class Tally:
    """What was fired and found on one loop."""

    loop: str
    suspensions: Counter[str] = field(default_factory=Counter)
    single: Counter[str] = field(default_factory=Counter)
    double: Counter[str] = field(default_factory=Counter)
    bad: Counter[str] = field(default_factory=Counter)
    violations: list[tuple[Plan, tuple[str, ...]]] = field(default_factory=list)
    secs: float = 0.0

    def count(self, verdict: Verdict) -> None:
        """Adds one verdict."""
        name = verdict.plan.scenario.name
        if verdict.fired >= 2:
            self.double[name] += 1
        elif verdict.fired == 1 and len(verdict.plan.shots) == 1:
            self.single[name] += 1
        if verdict.violations:
            self.bad[name] += 1
            self.violations.append((verdict.plan, verdict.violations))


def sweep(
    scenarios: Sequence[Scenario], *, points: int, double: int, loop: str = "asyncio", seed: int = 0, most_bad: int = 200
) -> Tally:
    """Fires so many points and says what was found; stops early at `most_bad` violations."""
    tally = Tally(loop)
    began = time.perf_counter()
    with Range(loop) as ground:
        for number in itertools.count():
            baselines = [_baseline(ground, scenario, seed + number, tally) for scenario in scenarios]
            order = random.Random(seed + number)
            # Fired in random order, so that a smaller count is as wide a choice.
            fired = _fire(ground, _shuffled(_singles(baselines), order), points, tally.single, tally, most_bad)
            _fire(ground, _shuffled(_doubles(fired), order), double, tally.double, tally, most_bad)
            enough = tally.single.total() >= points and tally.double.total() >= double
            # A round in which nothing could be fired says that nothing ever will.
            if enough or len(tally.violations) >= most_bad or not (tally.single or tally.double):
                break
    tally.secs = time.perf_counter() - began
    return tally


def _baseline(ground: Range, scenario: Scenario, seed: int, tally: Tally) -> Verdict:
    verdict = baseline(ground, scenario, seed)
    tally.count(verdict)
    tally.suspensions[scenario.name] = verdict.suspensions
    return verdict


def _shuffled(plans: Iterable[Plan], order: random.Random) -> list[Plan]:
    shuffled = list(plans)
    order.shuffle(shuffled)
    return shuffled


def _fire(ground: Range, plans: list[Plan], asked: int, counter: Counter[str], tally: Tally, most_bad: int) -> list[Verdict]:
    """Fires until so many have hit, and gives those that have."""
    hits: list[Verdict] = []
    position = 0
    while position < len(plans) and counter.total() < asked and len(tally.violations) < most_bad:
        some = plans[position : position + asked - counter.total()]
        position += len(some)
        for verdict in ground.fire(some):
            tally.count(verdict)
            if verdict.fired == len(verdict.plan.shots):
                hits.append(verdict)
    return hits


def _singles(baselines: Iterable[Verdict]) -> Iterator[Plan]:
    """Every way to cancel once."""
    for verdict in baselines:
        for wrapper in WRAPPERS:
            for at in range(1, verdict.suspensions + 1):
                for shot in _shots(at, at in verdict.in_children, wrapper is not Bare):
                    yield Plan(verdict.plan.scenario, verdict.plan.seed, wrapper, (shot,))


def _doubles(singles: Iterable[Verdict]) -> Iterator[Plan]:
    """Every way to cancel again, at every distance at which the operation still goes on after the first cancel."""
    for verdict in singles:
        (first,) = verdict.plan.shots
        for at in range(first.at + 1, min(verdict.suspensions, first.at + FARTHEST) + 1):
            for second in _shots(at, False, verdict.plan.wrapper is not Bare):
                yield Plan(verdict.plan.scenario, verdict.plan.seed, verdict.plan.wrapper, (first, second))


def _shots(at: int, in_child: bool, wrapped: bool) -> Iterator[Shot]:
    for flavour in ("S", "W"):
        yield Shot(at, "root", flavour)
        if in_child:
            yield Shot(at, "self", flavour)
        if wrapped:
            yield Shot(at, "root", flavour, "own")


def table(tally: Tally) -> str:
    """One row a scenario, and the sum."""
    lines = [f"{'scenario':44} {'suspends':>8} {'points':>8} {'double':>8} {'violations':>10}"]
    for name in tally.suspensions:
        row = (tally.suspensions[name], tally.single[name], tally.double[name], tally.bad[name])
        lines.append(f"{name:44} {row[0]:8} {row[1]:8} {row[2]:8} {row[3]:10}")
    single, double = tally.single.total(), tally.double.total()
    rate = (single + double) / tally.secs if tally.secs else 0
    lines.append(f"{'sum':44} {'':8} {single:8} {double:8} {len(tally.violations):10}")
    lines.append(f"{platform.python_version()} {tally.loop}: {tally.secs:.1f} s, {rate:.0f} points/s")
    return "\n".join(lines)


def report(tally: Tally) -> str:
    """What was found, each kind once, with a plan that can be fired again."""
    kinds: dict[str, list[tuple[str, Plan]]] = {}
    for plan, found in tally.violations:
        for one in found:
            kinds.setdefault(re.sub(r"[0-9]+", "#", one), []).append((one, plan))
    lines: list[str] = []
    for several in sorted(kinds.values(), key=len, reverse=True)[:MOST_SHOWN]:
        lines.append(f"{len(several)} x {several[0][0]}")
        scenarios = Counter(plan.scenario.name for _, plan in several)
        lines.append(f"    in {', '.join(f'{name} ({count})' for name, count in scenarios.most_common(6))}")
        lines += [f"    {plan}" for _, plan in several[:3]]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    from tests.programmes.scenarios import SCENARIOS

    parser = argparse.ArgumentParser(prog="python -m tests.programmes.cancel_sweep", description=__doc__)
    parser.add_argument("--points", type=int, default=100_000, help="cancels once, per loop (default %(default)s)")
    parser.add_argument("--double", type=int, default=30_000, help="cancels twice, per loop (default %(default)s)")
    parser.add_argument("--loop", choices=("asyncio", "uvloop", "both"), default="both")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scenario", help="only scenarios whose name contains this")
    options = parser.parse_args(arguments)
    chosen = [one for one in SCENARIOS if options.scenario is None or options.scenario in one.name]
    if not chosen:
        parser.error(f"no scenario contains {options.scenario!r}; there are: {', '.join(one.name for one in SCENARIOS)}")

    failed = False
    for loop in ("asyncio", "uvloop") if options.loop == "both" else (options.loop,):
        tally = sweep(chosen, points=options.points, double=options.double, loop=loop, seed=options.seed)
        print(table(tally), flush=True)
        if tally.violations:
            print(report(tally), flush=True)
        short = tally.single.total() < options.points or tally.double.total() < options.double
        if short:
            print(f"fewer points than asked for on {loop}", flush=True)
        failed = failed or short or bool(tally.violations)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
