"""The choices of a schedule: drawn from a seed, or explicit."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

DELAYS = (0.0, 0.001, 0.05, 1.0)
"""The seconds that pass where a schedule makes something slow."""
Place = tuple[str, int]
"""A kind of choice, and its number among the choices of this kind."""


class Priorities:
    """The order of tasks by PCT, probabilistic concurrency testing (Burckhardt et al., 2010).

    Each task gets a random priority, and the task with the highest priority runs, of all that can.
    At a few random decisions, the task that would run gets the lowest priority. So a task stands
    still for long while others run, which random choices at each decision hardly ever do.
    """

    def __init__(self, generator: random.Random, changes: int, decisions: int) -> None:
        """Change priorities so often, in a program of about so many decisions."""
        self._random = generator
        # At most this many tasks are lowered, so that most of a run is in one order.
        self._changes = generator.choices(range(1, decisions + 1), k=changes)
        # A task that polls for another one would run alone. After this, the order is the loop's.
        self._last = 2 * decisions + 20
        self._count = 0
        self._priority: dict[int, float] = {}

    def choose(self, tasks: Sequence[object]) -> int:
        """Return the index of the task that runs."""
        self._count += 1
        if self._count > self._last:
            return 0

        # Numbers, because a reference would keep a task whose error was never retrieved.
        numbers = [hash(task) for task in tasks]
        for number in numbers:
            if number not in self._priority:
                self._priority[number] = self._random.random()
        highest = max(numbers, key=self._priority.__getitem__)
        if self._count in self._changes:
            self._priority[highest] = -self._count
            highest = max(numbers, key=self._priority.__getitem__)
        return numbers.index(highest)


class Schedule:
    """The choices of a seed, or explicit choices. Choice 0 is the undisturbed behavior."""

    def __init__(
        self,
        seed: int = 0,
        rates: Mapping[str, float] | None = None,
        choices: Mapping[Place, int] | None = None,
        noted: Collection[str] = (),
        priorities: Priorities | None = None,
    ) -> None:
        """Make random choices, each kind at its rate, or take `choices`. Note the alternatives of
        `noted` kinds. With `priorities`, these choose the order of tasks.
        """
        self._rates = rates or {}
        self._random = random.Random(seed)
        self._choices = choices or {}
        self._noted = noted
        self._priorities = priorities
        self.is_replay: bool = bool(choices)
        self.counts: Counter[str] = Counter()
        """The number of choices, by key: a kind, perhaps with a name."""
        self.taken: dict[Place, int] = {}
        """The choices other than 0."""
        self.alternatives: list[tuple[Place, int]] = []
        """The noted choices of 0 after the last choice in `taken`, with their number of options."""

    def choose(self, kind: str, key: str, options: Sequence[object]) -> int:
        """Return the index of an option. The key is the kind, perhaps with a name."""
        self.counts[key] += 1
        place = key, self.counts[key]
        choice = self._choose(kind, place, options)

        if choice:
            self.taken[place] = choice
            # Earlier ones are tried from the schedule that was without this choice.
            self.alternatives.clear()
        elif len(options) > 1 and kind in self._noted:
            self.alternatives.append((place, len(options)))
        return choice

    def _choose(self, kind: str, place: Place, options: Sequence[object]) -> int:
        last = len(options) - 1
        if self.is_replay:
            # A program that has changed may have fewer options by now.
            return min(self._choices.get(place, 0), last)
        if kind == "order" and self._priorities is not None:
            return self._priorities.choose(options)
        rate = self._rates.get(kind, 0.0)
        if rate and last and self._random.random() < rate:
            return self._random.randint(1, last)
        return 0

    def take_back(self, key: str) -> Place:
        """Forget the last choice of this key, which had no effect, and return its place."""
        place = key, self.counts[key]
        self.taken.pop(place, None)
        return place
