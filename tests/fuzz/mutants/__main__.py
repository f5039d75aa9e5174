"""Make small faults in the library and run the fast tests of the changed module: `python -m
tests.fuzz.mutants --count 500`.

Prints each fault that no test notices, and a table of all. Fails if fewer than 95 % of those that
change behaviour are killed; those that change none are listed in `equivalent.py` with their
reasons, and are not tried.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.fuzz._harness import command
from tests.fuzz.mutants.changes import Mutant, mutants
from tests.fuzz.mutants.equivalent import EQUIVALENT
from tests.fuzz.mutants.trials import is_possible
from tests.support.source import ROOT

MODULES = (
    "aiohooks/dispatch/",
    "aiohooks/_core/",
    "aiohooks/session/",
    "aiohooks/graph/",
    "aiohooks/checkpoint/",
    "aiohooks/version_gate.py",
    "aiohooks/stores/engine.py",
    "aiohooks/stores/_connection.py",
    "aiohooks/stores/_members.py",
    "aiohooks/stores/base.py",
    "aiohooks/stores/shared.py",
    "aiohooks/stores/local/",
)
TESTS = {
    "graph": (
        "tests/graph",
        "tests/session/test_monitored.py",
        "tests/session/test_monitored_arguments.py",
        "tests/session/test_run_lock.py",
        "tests/session/test_creators.py",
        "tests/session/test_creators_shared_stores.py",
        "tests/session/test_creators_restore.py",
        "tests/session/test_feeds.py",
        "tests/hooks/test_profiler.py",
    ),
    "dispatch": (
        "tests/dispatch",
        "tests/session/test_status.py",
        "tests/session/test_feeds.py",
        "tests/session/test_monitored.py",
        "tests/core/test_observers.py",
        "tests/hooks/test_profiler.py",
        "tests/hooks/test_effects.py",
    ),
    "_core": (
        "tests/core",
        "tests/dispatch",
        "tests/graph",
        "tests/session",
        "tests/adapters/test_opentelemetry.py",
    ),
    "session": (
        "tests/session",
        "tests/tensorflow",
        "tests/graph/test_plan_fetches.py",
        "tests/dispatch/test_background.py",
        "tests/stores/test_publishers.py",
        "tests/hooks/test_checkpoint_saver.py",
        "tests/checkpoint/test_mirror_session.py",
        "tests/adapters/test_opentelemetry.py",
        "tests/hooks/test_profiler.py",
    ),
    "checkpoint": (
        "tests/checkpoint",
        "tests/hooks/test_checkpoint_saver_torch.py",
        "tests/integration/test_checkpoint_programs.py",
    ),
    "stores": (
        "tests/stores",
        "tests/integration/test_simulation.py",
        "tests/integration/test_store_servers.py",
        "tests/integration/test_redis.py",
        "tests/integration/test_redis_refusals.py",
        "tests/why/test_builder.py",
    ),
    "hooks": (
        "tests/hooks",
        "tests/session/test_training.py",
        "tests/tensorflow/test_hooks_values.py",
        "tests/tensorflow/test_hooks_periodic.py",
    ),
}
"""The tests of a package that are not just those in the folder of the same name."""
ALL = ("tests/project/test_argument_values.py", "tests/project/test_costs.py")
"""The tests of every package."""

BAR = 0.95


def all_faults(modules: Sequence[str]) -> dict[Mutant, str]:
    """Return every fault of these modules and folders, in the order of the text, with the text of
    its module.
    """
    sources = {
        str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
        for module in modules
        for path in (
            [ROOT / module] if module.endswith(".py") else sorted((ROOT / module).rglob("*.py"))
        )
    }
    return {one: source for module, source in sources.items() for one in mutants(module, source)}


def chosen(modules: Sequence[str], match: str, count: int, seed: int) -> list[Mutant]:
    """Return random faults of these modules and folders, in the order of the text."""
    faults = {one: source for one, source in all_faults(modules).items() if match in str(one)}
    shuffled = random.Random(seed).sample(list(faults), len(faults))
    taken = set(itertools.islice((one for one in shuffled if is_possible(one, faults[one])), count))
    return [one for one in faults if one in taken]


def tried(
    faults: Sequence[Mutant], tests: Sequence[str], hang_secs: float, *, every_test: bool = False
) -> Iterator[tuple[Mutant | None, str, str]]:
    """Try faults in a copy of the tree; yield each with its fate and the test that decided it, or
    with `every_test` all tests that fail, one a line.
    """
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:  # short, as paths of sockets are
        copy = Path(folder) / "tree"
        # The last ones are written by other processes that compile a module just now, and renamed.
        shutil.copytree(
            ROOT, copy, ignore=shutil.ignore_patterns(".*", "venv", "build", "dist", "*.pyc.*")
        )
        job = copy / "job.json"
        what = {
            "faults": [dataclasses.asdict(one) for one in faults],
            "tests": tests,
            "hang_secs": hang_secs,
            "every_test": every_test,
        }
        job.write_text(json.dumps(what), encoding="utf-8")
        reader, writer = os.pipe()
        with (copy / "output").open("w+", encoding="utf-8") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.fuzz.mutants.trials", str(job), str(writer)],
                cwd=copy,
                env=os.environ | {"PYTHONPATH": str(copy), "TMPDIR": folder},
                pass_fds=[writer],
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            os.close(writer)
            try:
                with os.fdopen(reader, encoding="utf-8") as results:
                    for number, fate, test in map(json.loads, results):
                        yield None if number < 0 else faults[number], fate, test
            finally:
                process.kill() if process.poll() is None and sys.exc_info()[0] else process.wait()
            if process.returncode:
                output.seek(0)
                raise SystemExit(f"the tests could not be run:\n{output.read()[-3000:]}")


def package(module: str) -> str:
    """Return the package of a module: `dispatch` for `aiohooks/dispatch/calls.py`."""
    return module.split("/")[1]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = command("mutants", __doc__, count=500)
    parser.add_argument(
        "--module",
        nargs="+",
        default=MODULES,
        help="modules, or folders of them that end in a slash",
    )
    parser.add_argument(
        "--match", default="", help="only faults whose line in the list contains this"
    )
    parser.add_argument(
        "--tests", nargs="+", help="the tests to run, instead of those of the package"
    )
    parser.add_argument(
        "--hang-secs",
        type=float,
        default=20,
        help="a fault whose test takes longer is killed (default %(default)s)",
    )
    parser.add_argument("--verbose", action="store_true", help="print what kills each fault, too")
    options = parser.parse_args(arguments)

    fates: Counter[tuple[str, str]] = Counter()
    by_package: dict[str, list[Mutant]] = {}
    for one in chosen(options.module, options.match, options.count, options.seed):
        name = package(one.module)
        if (one.module, one.function, one.change) in EQUIVALENT:
            fates[name, "equivalent"] += 1
        else:
            by_package.setdefault(name, []).append(one)

    for name, faults in by_package.items():
        tests = options.tests or (*TESTS.get(name, (f"tests/{name}",)), *ALL)
        for fault, fate, test in tried(faults, tests, options.hang_secs):
            if fault is not None:
                fates[name, fate] += 1
            if (fault or test) and (fate != "killed" or options.verbose):
                print(f"{fate}: {fault or ''}" + (f"\n    {test}" if test else ""), flush=True)
    return report(fates)


def report(fates: Counter[tuple[str, str]]) -> int:
    """Print the table; return 1 if the tests are too weak."""
    columns = ("killed", "survived", "equivalent")
    print("package", *columns, sep="\t")
    for name in dict.fromkeys(name for name, _ in fates):
        print(name, *(fates[name, column] for column in columns), sep="\t")
    killed, survived, equivalent = (
        sum(fates[name, column] for name in {name for name, _ in fates}) for column in columns
    )
    print("all", killed, survived, equivalent, sep="\t")
    print(
        f"{killed / max(1, killed + survived):.1%} of the faults that change behaviour are killed"
    )
    return int(killed < BAR * (killed + survived))


if __name__ == "__main__":
    sys.exit(main())
