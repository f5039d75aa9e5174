"""The choices that make a schedule: drawn from a seed, or explicit.

A run of a program asks its schedule for a choice at each place where the program could be
disturbed. A place is a kind of choice and its number, such as the third choice of the kind "slow".
"""

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

    Each task gets a random priority. Of the tasks that can run, the one with the highest priority
    runs. At a few random decisions, the task that would run gets the lowest priority instead. So a
    task stands still for long while others run, which random choices hardly ever cause.
    """

    def __init__(self, generator: random.Random, changes: int, decisions: int) -> None:
        """Lower `changes` priorities in a program that makes about as many `decisions` of order."""
        self._random = generator
        # The numbers of the decisions at which a priority is lowered.
        self._changes = generator.choices(range(1, decisions + 1), k=changes)
        # A task that polls for another task would run alone, and the program would never end. After
        # this decision, tasks run in the order of the loop.
        self._last_decision = 2 * decisions + 20
        self._count = 0
        self._priority: dict[int, float] = {}

    def choose(self, tasks: Sequence[object]) -> int:
        """Return the index of the task that runs."""
        self._count += 1
        if self._count > self._last_decision:
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
        """Make random choices, or replay `choices` if there are any.

        Args:
            seed: the seed of the random choices.
            rates: how often a random choice of each kind is not 0. The default is never.
            choices: the choices to replay, by place. All others are 0.
            noted: the kinds of choices whose `alternatives` are noted.
            priorities: chooses the order of tasks in place of `rates`.
        """
        self._rates = rates or {}
        self._random = random.Random(seed)
        self._choices = choices or {}
        self._noted = noted
        self._priorities = priorities
        self.is_replay: bool = bool(choices)
        self.counts: Counter[str] = Counter()
        """The number of choices by key, which is the kind, or the kind and a name."""
        self.taken: dict[Place, int] = {}
        """The choices other than 0."""
        self.alternatives: list[tuple[Place, int]] = []
        """The places after the last choice in `taken` at which a noted kind had other options than
        0, with the number of options.
        """

    def choose(self, kind: str, key: str, options: Sequence[object]) -> int:
        """Return the index of the chosen option.

        The key is the kind, or the kind and a name: choices with another key do not change the
        numbers of these.
        """
        self.counts[key] += 1
        place = key, self.counts[key]
        choice = self._choose(kind, place, options)
        if choice:
            self.taken[place] = choice
            # Alternatives before this choice belong to the schedule without this choice, which has
            # noted them.
            self.alternatives.clear()
        elif len(options) > 1 and kind in self._noted:
            self.alternatives.append((place, len(options)))
        return choice

    def _choose(self, kind: str, place: Place, options: Sequence[object]) -> int:
        """Return the index of an option: replayed, by priorities, or at the rate of the kind."""
        last = len(options) - 1
        if self.is_replay:
            # A program that has changed since may have fewer options here.
            return min(self._choices.get(place, 0), last)
        if kind == "order" and self._priorities is not None:
            return self._priorities.choose(options)
        rate = self._rates.get(kind, 0.0)
        if rate and last and self._random.random() < rate:
            return self._random.randint(1, last)
        return 0
