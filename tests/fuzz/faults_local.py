"""Kill and stop processes that use the local store, and count what happens to the others.

    python -m tests.fuzz.faults_local --count 200

In each trial some processes wait and advance on a run of its own. One of them is killed (SIGKILL) or stopped (SIGSTOP, and
continued later) while it has the lock, or is killed at one of the system calls that it makes in its life; or the chief is killed,
and the time until the others notice is measured. `tests.fuzz.random_faults` has processes without the lock. Then is checked that

- all waits of the others end: at their step ("resumed"), or with the expected error ("typed error");
- the step is at least what was acknowledged, and at most what was begun: nothing is lost and nothing is counted twice;
- no slot, file or process is left over.
"""

from __future__ import annotations

import argparse
import functools
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from aiohooks.stores.local import _files, _lock, _notify
from tests.conformance.report import installed_loops, loop_factory
from tests.fuzz._harness import scratch
from tests.fuzz._local_workers import StuckError, WorkerProcess

CALLS = 200
"""About how many system calls the process makes that is killed at one of them."""
_CALL_NAMES = (
    *("open", "close", "read", "pread", "pwrite", "rename", "unlink", "ftruncate", "stat", "fstat", "listdir"),
    *("flock", "lockf"),
)
_LOOPS = [loop_factory(name) for name in installed_loops()]


@dataclass
class Trial:
    """One run with its processes."""

    directory: Path
    run: str
    rnd: random.Random
    workers: list[WorkerProcess] = field(default_factory=list)
    secs: list[float] = field(default_factory=list)
    """From each death to its notification."""

    def start_worker(self, prepare: Callable[[], object] | None = None) -> WorkerProcess:
        """Start one more process."""
        self.workers.append(WorkerProcess(self.directory, self.run, loop=self.rnd.choice(_LOOPS), prepare=prepare))
        return self.workers[-1]

    def random_secs(self) -> float:
        """Return the time until the fault: from 0 to several times what any operation here takes."""
        return self.rnd.random() ** 2 * 0.02

    def close(self) -> None:
        """End all processes, and check that they end well."""
        for worker in self.workers:
            if worker.status is None:
                worker.start("quit")
        for worker in self.workers:
            if worker.reap() not in (0, -signal.SIGKILL):
                raise AssertionError(f"process {worker.pid} ended with {worker.status}")

    def kill_all(self) -> None:
        """Kill all processes that are left."""
        for worker in self.workers:
            if worker.status is None:
                worker.send(signal.SIGKILL)
                worker.reap()


def killed_holder(trial: Trial) -> str:
    """A process that holds the lock is killed: those that wait for the lock continue."""
    victim, waiter, advancer = trial.start_worker(), trial.start_worker(), trial.start_worker()
    advancer.call("value")
    wait = waiter.start("wait", step=10)
    waiter.call("parked")
    victim.call("hold_lock")
    advance = advancer.start("advance", times=10)
    late = waiter.start("wait", step=5)
    advancer.call("ping")  # its loop is not blocked
    waiter.call("ping")
    victim.ends_within(trial.random_secs())
    victim.send(signal.SIGKILL)
    victim.reap()
    assert advancer.result(advance)["result"] == 10
    assert waiter.result(wait)["result"] >= 10
    assert waiter.result(late)["result"] >= 5
    return "resumed"


def killed_chief(trial: Trial) -> str:
    """The chief is killed: waiters get an error, or the next chief takes over in a new term."""
    victim, waiter, successor = trial.start_worker(), trial.start_worker(), trial.start_worker()
    first = victim.call("lead")["result"]
    wait = waiter.start("wait", step=1_000_000)
    waiter.call("parked")
    lead = successor.start("lead") if trial.rnd.random() < 0.5 else None
    successor.call("parked")
    victim.start("keep_advancing")
    victim.ends_within(trial.random_secs())
    began = victim.send(signal.SIGKILL)
    if lead is None:
        ended = waiter.result(wait)
        assert ended["error"] == "PublisherFailedError", ended
        assert ended["text"].startswith("chief failed"), ended
        trial.secs.append(ended["at"] - began)
        lead = successor.start("lead")
        status = "typed error"
    else:
        status = "resumed"
    led = successor.result(lead)
    assert led["result"] > first, led
    if status == "resumed":
        trial.secs.append(led["at"] - began)
        successor.call("advance", times=1, by=1_000_000)
        assert waiter.result(wait)
    victim.reap()
    return status


def stopped_holder(trial: Trial) -> str:
    """A process that holds the lock is stopped for a while: it does not count as dead, no wake-up is lost, no loop is blocked."""
    victim, waiter, advancer = trial.start_worker(), trial.start_worker(), trial.start_worker()
    wait = waiter.start("wait", step=300)
    waiter.call("parked")
    victim.call("hold_lock")
    victim.ends_within(trial.random_secs())
    victim.send(signal.SIGSTOP)
    victim.wait_stopped()
    advance = advancer.start("advance", times=300)
    waiter.call("ping")
    advancer.call("ping")
    victim.send(signal.SIGCONT)
    victim.start("quit")
    victim.reap()
    assert advancer.result(advance)["result"] >= 300
    assert waiter.result(wait)["result"] >= 300
    return "resumed"


def die_at_call(number: int) -> None:
    """Let this process die (SIGKILL) at a system call of the local store: for an even `number` before it, else after it."""
    left = [number]

    def counted(call: Any) -> Any:
        def calling(*args: Any, **kwargs: Any) -> Any:
            left[0] -= 2
            if left[0] == -2:
                os.kill(os.getpid(), signal.SIGKILL)
            result = call(*args, **kwargs)
            if left[0] == -1:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return calling

    for module in (_files, _lock, _notify):
        for name in ("os", "fcntl"):
            real = getattr(module, name, None)
            if isinstance(real, ModuleType):
                counting = {call: counted(getattr(real, call)) for call in _CALL_NAMES if hasattr(real, call)}
                setattr(module, name, SimpleNamespace(**{**vars(real), **counting}))


def killed_at_a_call(trial: Trial) -> str:
    """A process is killed at the n-th system call that it makes, in each of the things that it does in its life."""
    waiter, other = trial.start_worker(), trial.start_worker()
    wait = waiter.start("wait", step=5)
    far = waiter.start("wait", step=1_000_000)
    waiter.call("parked")
    victim = trial.start_worker(functools.partial(die_at_call, trial.rnd.randrange(2 * CALLS)))
    victim.start("wait", step=1_000)
    victim.start("advance", times=8)
    lead = victim.result(victim.start("lead"))
    victim.result(victim.start("advance", times=3))
    victim.start("quit")
    victim.reap()
    reached = other.call("value")["result"]
    if not lead:
        assert other.call("lead")["result"] >= 1
        other.call("advance", times=1, by=1_000_000)
    # It may have been known as a publisher already when it died.
    ends = [(5, waiter.result(wait)), (1_000_000, waiter.result(far))]
    for step, ended in ends:
        assert ended.get("result", 0) >= step or ended["error"] in _NO_PUBLISHER, ended
    assert reached < 5 or "result" in ends[0][1], ends
    return "typed error" if any("error" in ended for _, ended in ends) else "resumed"


_NO_PUBLISHER = ("PublisherFailedError", "PublisherFinishedError")

FAULTS: dict[str, Callable[[Trial], str]] = {
    "lock holder killed": killed_holder,
    "lock holder stopped and continued": stopped_holder,
    "chief killed": killed_chief,
    "killed at its n-th call": killed_at_a_call,
}


def check_counts(trial: Trial) -> None:
    """Check, by what the processes have begun and what was acknowledged, that nothing is lost and nothing counted twice."""
    step = trial.start_worker().call("value")["result"]
    begun, acknowledged = (sum(counts) for counts in zip(*(worker.counts for worker in trial.workers), strict=True))
    assert acknowledged <= step <= begun, f"step {step}, acknowledged {acknowledged}, begun {begun}"


def check_nothing_left(directory: Path) -> None:
    """Check that no process has the run open any more, and that no slot is left."""
    for run in directory.iterdir():
        left = [*(run / "alive").iterdir()]
        slots = (run / "position").read_bytes()[128:]
        assert not left, left
        assert not slots, slots
        assert {path.name for path in run.iterdir()} <= {"position", "notify", "state", "state.new", "alive"}


@dataclass
class Outcome:
    """The results of all trials."""

    statuses: Counter[tuple[str, str]] = field(default_factory=Counter[tuple[str, str]])
    secs: list[float] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def run_trials(count: int, seed: int, kinds: Sequence[str] = tuple(FAULTS)) -> Outcome:
    """Run `count` trials, one kind after the other."""
    outcome = Outcome()
    for number in range(count):
        kind = kinds[number % len(kinds)]
        with scratch() as directory:
            trial = Trial(directory, f"trial {number}", random.Random(f"{seed} {number}"))
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
                trial.kill_all()
        outcome.statuses[kind, status] += 1
        outcome.secs += trial.secs
    return outcome


def main(argv: Sequence[str] | None = None) -> int:
    """Run the trials and print the results; return 1 if there were problems."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.faults_local", description=__doc__)
    parser.add_argument("--count", type=int, default=200, help="how many faults")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", nargs="+", choices=list(FAULTS), default=list(FAULTS))
    options = parser.parse_args(argv)
    began = time.monotonic()
    outcome = run_trials(options.count, options.seed, options.kinds)
    for kind in options.kinds:
        found = {status: n for (each, status), n in outcome.statuses.items() if each == kind}
        print(f"{kind:<36}{', '.join(f'{n} {status}' for status, n in found.items())}")
    if outcome.secs:
        ms = sorted(1e3 * secs for secs in outcome.secs)
        print(
            f"from a chief's death to its notification: median {ms[len(ms) // 2]:.2f} ms, maximum {ms[-1]:.2f} ms, of {len(ms)}"
        )
    print(*outcome.problems, sep="\n")
    print(f"{options.count} faults in {time.monotonic() - began:.0f} s: {'NOT GOOD' if outcome.problems else 'all good'}")
    return int(bool(outcome.problems))


if __name__ == "__main__":
    sys.exit(main())
