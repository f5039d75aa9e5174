"""What the local store does when its processes are killed or stopped, counted.

    python -m tests.fuzz.faults_local --count 200

In each trial some processes wait and advance on a run of its own. One of them is killed (SIGKILL) or stopped (SIGSTOP, and
continued later) at a random moment, or at each call that it makes of the system in turn. Then it is looked whether

- all waits of the others end: at their step ("resumed"), or with the error that is to be expected ("typed error");
- the step is what was acknowledged, and at most what was begun besides: nothing twice, nothing lost;
- no slot, file or process is left over.
"""

from __future__ import annotations

import argparse
import functools
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.conformance.report import installed_loops, loop_factory
from tests.fuzz._local_crew import Crew, StuckError
from tests.fuzz._local_points import die_at_call

CALLS = 200
"""So many calls of the system the process makes, about, that is killed at one of them."""
_LOOPS = [loop_factory(name) for name in installed_loops()]


@dataclass
class Trial:
    """One run with its processes."""

    directory: Path
    run: str
    order: random.Random
    crew: list[Crew] = field(default_factory=list)
    secs: list[float] = field(default_factory=list)
    """From a death to its news."""

    def join(self, prepare: Callable[[], object] | None = None) -> Crew:
        """One more process."""
        self.crew.append(Crew(self.directory, self.run, loop=self.order.choice(_LOOPS), prepare=prepare))
        return self.crew[-1]

    def some_secs(self) -> float:
        """Until the fault: from nothing to several times what anything here takes."""
        return self.order.random() ** 2 * 0.02

    def close(self) -> None:
        """Ends all processes well."""
        for one in self.crew:
            if one.status is None:
                one.order("quit")
        for one in self.crew:
            if one.reap() not in (0, -signal.SIGKILL):
                raise AssertionError(f"process {one.pid} ended with {one.status}")

    def abandon(self) -> None:
        """Ends all processes somehow."""
        for one in self.crew:
            if one.status is None:
                one.send(signal.SIGKILL)
                one.reap()


def killed_waiter(trial: Trial) -> str:
    """A process that waits is killed; the others are woken all the same."""
    victim, waiter, advancer = trial.join(), trial.join(), trial.join()
    wait = waiter.order("wait", step=500)
    victim.order("go_on_waiting")
    advancer.order("go_on_advancing", pause=5)
    victim.ends_within(trial.some_secs())
    victim.send(signal.SIGKILL)
    victim.reap()
    assert waiter.answer(wait)["result"] >= 500
    advancer.order("quit")
    return "resumed"


def killed_advancer(trial: Trial) -> str:
    """A process that advances is killed; waits whose step was reached have ended, the others go on."""
    victim, waiter, other = trial.join(), trial.join(), trial.join()
    waits = {step: waiter.order("wait", step=step) for step in range(1, 400, 7)}
    far = waiter.order("wait", step=1_000_000)
    waiter.do("parked")
    victim.order("go_on_advancing")
    victim.ends_within(trial.some_secs())
    victim.send(signal.SIGKILL)
    victim.reap()
    reached = other.do("value")["result"]
    for step, wait in waits.items():
        if step <= reached:
            assert waiter.answer(wait)["result"] >= step
    other.do("advance", times=1, by=1_000_000)
    for step, wait in waits.items():
        if step > reached:
            assert waiter.answer(wait)["result"] >= 1_000_000
    assert waiter.answer(far)["result"] >= 1_000_000
    return "resumed"


def killed_holder(trial: Trial) -> str:
    """A process that has the lock is killed: those in the queue go on."""
    victim, waiter, advancer = trial.join(), trial.join(), trial.join()
    advancer.do("value")
    wait = waiter.order("wait", step=10)
    waiter.do("parked")
    victim.do("hold")
    advance = advancer.order("advance", times=10)
    late = waiter.order("wait", step=5)
    advancer.do("ping")  # the loop is not held up
    waiter.do("ping")
    victim.ends_within(trial.some_secs())
    victim.send(signal.SIGKILL)
    victim.reap()
    assert advancer.answer(advance)["result"] == 10
    assert waiter.answer(wait)["result"] >= 10
    assert waiter.answer(late)["result"] >= 5
    return "resumed"


def killed_chief(trial: Trial) -> str:
    """The chief is killed: who waits is told, and the next chief takes over in a new term."""
    victim, waiter, successor = trial.join(), trial.join(), trial.join()
    first = victim.do("lead")["result"]
    wait = waiter.order("wait", step=1_000_000)
    waiter.do("parked")
    lead = successor.order("lead") if trial.order.random() < 0.5 else None
    successor.do("parked")
    victim.order("go_on_advancing")
    victim.ends_within(trial.some_secs())
    began = victim.send(signal.SIGKILL)
    if lead is None:
        told = waiter.answer(wait)
        assert told["error"] == "PublisherFailedError", told
        assert told["text"].startswith("chief failed"), told
        trial.secs.append(told["at"] - began)
        lead = successor.order("lead")
        status = "typed error"
    else:
        status = "resumed"
    led = successor.answer(lead)
    assert led["result"] > first, led
    if status == "resumed":
        trial.secs.append(led["at"] - began)
    if status == "resumed":
        successor.do("advance", times=1, by=1_000_000)
        assert waiter.answer(wait)
    victim.reap()
    return status


def _stopped(trial: Trial, role: str, *, lead: bool = False) -> str:
    """A process is stopped for a while: nobody takes it for dead, nobody is lost, no loop is held up."""
    victim, waiter, advancer = trial.join(), trial.join(), trial.join()
    if lead:
        victim.do("lead")
    wait = waiter.order("wait", step=300)
    waiter.do("parked")
    if role == "hold":
        victim.do("hold")
    else:
        victim.order(role)
    victim.ends_within(trial.some_secs())
    victim.send(signal.SIGSTOP)
    victim.stopped()
    advance = advancer.order("advance", times=300)
    waiter.do("ping")
    advancer.do("ping")
    victim.send(signal.SIGCONT)
    if role == "hold":
        victim.order("quit")
        victim.reap()
    assert advancer.answer(advance)["result"] >= 300
    assert waiter.answer(wait)["result"] >= 300
    return "resumed"


def stopped_waiter(trial: Trial) -> str:
    """A process that waits is stopped; when it goes on it is woken as well."""
    victim, advancer = trial.join(), trial.join()
    wait = victim.order("wait", step=100)
    victim.do("parked")
    victim.send(signal.SIGSTOP)
    victim.stopped()
    advancer.do("advance", times=150)
    victim.send(signal.SIGCONT)
    assert victim.answer(wait)["result"] >= 100
    return "resumed"


def killed_at_a_call(trial: Trial) -> str:
    """A process is killed at the n-th call of the system that it makes, in each of the things that it does in its life."""
    waiter, other = trial.join(), trial.join()
    wait = waiter.order("wait", step=5)
    far = waiter.order("wait", step=1_000_000)
    waiter.do("parked")
    victim = trial.join(functools.partial(die_at_call, trial.order.randrange(2 * CALLS)))
    victim.order("wait", step=1_000)
    victim.order("advance", times=8)
    lead = victim.answer(victim.order("lead"))
    victim.answer(victim.order("advance", times=3))
    victim.order("quit")
    victim.reap()
    reached = other.do("value")["result"]
    if not lead:
        assert other.do("lead")["result"] >= 1
        other.do("advance", times=1, by=1_000_000)
    # It may have been known as a publisher already when it died.
    answers = [(5, waiter.answer(wait)), (1_000_000, waiter.answer(far))]
    for step, told in answers:
        assert told.get("result", 0) >= step or told["error"] in _NOBODY_LEFT, told
    assert reached < 5 or "result" in answers[0][1], answers
    return "typed error" if any("error" in told for _, told in answers) else "resumed"


_NOBODY_LEFT = ("PublisherFailedError", "PublisherFinishedError")

FAULTS: dict[str, Callable[[Trial], str]] = {
    "waiter killed": killed_waiter,
    "advancer killed": killed_advancer,
    "lock holder killed": killed_holder,
    "chief killed": killed_chief,
    "killed at its n-th call": killed_at_a_call,
    "advancer stopped and continued": functools.partial(_stopped, role="go_on_advancing"),
    "lock holder stopped and continued": functools.partial(_stopped, role="hold"),
    "chief stopped and continued": functools.partial(_stopped, role="go_on_advancing", lead=True),
    "waiter stopped and continued": stopped_waiter,
}


def check_counts(trial: Trial) -> None:
    """Nothing is lost, nothing is counted twice, by what the processes had begun and what was acknowledged to them."""
    step = trial.join().do("value")["result"]
    begun, acknowledged = (sum(counts) for counts in zip(*(one.counts for one in trial.crew), strict=True))
    assert acknowledged <= step <= begun, f"step {step}, acknowledged {acknowledged}, begun {begun}"


def check_nothing_left(directory: Path) -> None:
    """No process has a place in the run any more, and no slot waits for anything."""
    for run in directory.iterdir():
        left = [*(run / "alive").iterdir(), *(run / "bells").iterdir()]
        slots = (run / "quiet").read_bytes()[128:]
        assert not left, left
        assert not slots, slots
        assert {path.name for path in run.iterdir()} <= {"quiet", "loud", "state", "state.new", "alive", "bells"}


@dataclass
class Outcome:
    """What came of all trials."""

    verdicts: Counter[tuple[str, str]] = field(default_factory=Counter[tuple[str, str]])
    secs: list[float] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def good(self) -> bool:
        """Whether nothing was stuck, lost, doubled or left over."""
        return not self.problems


def run_trials(count: int, seed: int, kinds: Sequence[str] = tuple(FAULTS)) -> Outcome:
    """So many faults, one kind after the other."""
    outcome = Outcome()
    for number in range(count):
        kind = kinds[number % len(kinds)]
        with tempfile.TemporaryDirectory(dir=_fast_directory()) as name:
            trial = Trial(Path(name), f"trial {number}", random.Random(f"{seed} {number}"))
            try:
                status = FAULTS[kind](trial)
                trial.close()
                check_counts(trial)
                trial.close()
                check_nothing_left(trial.directory)
            except (AssertionError, StuckError, KeyError) as error:
                status = "stuck" if isinstance(error, StuckError) else "wrong"
                outcome.problems.append(f"{kind}, trial {number} of seed {seed}: {type(error).__name__}: {error}")
            finally:
                trial.abandon()
        outcome.verdicts[kind, status] += 1
        outcome.secs += trial.secs
    return outcome


def _fast_directory() -> str | None:
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) and sys.platform == "linux" else None


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the trials and prints what came of them; 1 if anything was not as it should be."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.faults_local", description=__doc__)
    parser.add_argument("--count", type=int, default=207, help="how many faults")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", nargs="+", choices=list(FAULTS), default=list(FAULTS))
    options = parser.parse_args(argv)
    began = time.monotonic()
    outcome = run_trials(options.count, options.seed, options.kinds)
    for kind in options.kinds:
        found = {status: n for (each, status), n in outcome.verdicts.items() if each == kind}
        print(f"{kind:<36}{', '.join(f'{n} {status}' for status, n in found.items())}")
    if outcome.secs:
        ms = sorted(1e3 * secs for secs in outcome.secs)
        print(
            f"from a chief's death to the news of it: {ms[len(ms) // 2]:.2f} ms in the middle, {ms[-1]:.2f} at most, of {len(ms)}"
        )
    print(*outcome.problems, sep="\n")
    print(f"{options.count} faults in {time.monotonic() - began:.0f} s: {'all good' if outcome.good else 'NOT GOOD'}")
    return 0 if outcome.good else 1


if __name__ == "__main__":
    sys.exit(main())
