"""The choices that make a schedule: drawn from a seed, or explicit.

A run of a program asks its schedule for a choice at each place where the program could be
disturbed. The key of a choice is its kind, or its kind and a name. A place is a key and a number,
such as the third choice of the kind "slow".

Option 0 of each choice is the ordinary behavior. Each other option is a disturbance.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

DELAYS = (0.0, 0.001, 0.05, 1.0)
"""The options of the kind "slow": the seconds that pass. By option 0, none pass."""
Place = tuple[str, int]
"""The key of a choice, and its number among the choices of this key, counted from 1."""


class Priorities:
    """The order of tasks by PCT, probabilistic concurrency testing (Burckhardt et al., 2010).

    Each task gets a random priority. Of the tasks that can run, the task with the highest priority
    runs. At a few random decisions, the task that would run gets the lowest priority, and another
    task runs. So a task stands still for long while others run, which random choices hardly ever
    cause.
    """

    def __init__(self, generator: random.Random, changes: int, decisions: int) -> None:
        """Make the priorities of one run.

        Args:
            generator: makes the random priorities.
            changes: how often a task gets the lowest priority.
            decisions: about how many decisions about the order of tasks the program needs.
        """
        self._random = generator
        # The numbers of the decisions at which a task gets the lowest priority.
        self._changes = generator.choices(range(1, decisions + 1), k=changes)
        # After this decision, tasks run in the order of the loop. Otherwise a task that polls for
        # another task could run alone, and the program would never end.
        self._last_decision = 2 * decisions + 20
        # The number of the current decision.
        self._decision = 0
        self._priority: dict[int, float] = {}

    def choose(self, tasks: Sequence[object]) -> int:
        """Return the index of the task that runs."""
        self._decision += 1
        if self._decision > self._last_decision:
            return 0
        # The hash of a task is its number. Priorities are kept by number, because a reference would
        # keep a task alive, and asyncio reports an error that was never retrieved when it dies.
        numbers = [hash(task) for task in tasks]
        for number in numbers:
            if number not in self._priority:
                self._priority[number] = self._random.random()
        highest = max(numbers, key=self._priority.__getitem__)
        if self._decision in self._changes:
            # Random priorities are above 0, and those of earlier decisions are above this one.
            self._priority[highest] = -self._decision
            highest = max(numbers, key=self._priority.__getitem__)
        return numbers.index(highest)


class Schedule:
    """The choices of a seed, or explicit choices. Without either, there is no disturbance."""

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
            rates: the part of the random choices of each kind that are disturbances. By default,
                there are none.
            choices: the options to choose again, by place. At all other places, it is option 0.
            noted: the kinds of choices whose `alternatives` are noted.
            priorities: chooses the order of tasks in place of `rates`.
        """
        self._rates = rates or {}
        self._random = random.Random(seed)
        self._replayed = choices or {}
        self._noted = noted
        self._priorities = priorities
        self.is_replay: bool = bool(choices)
        self.counts: Counter[str] = Counter()
        """The number of choices so far, by key."""
        self.taken: dict[Place, int] = {}
        """The disturbances: the chosen options other than 0, by place."""
        self.alternatives: list[tuple[Place, int]] = []
        """The places after the last disturbance at which a noted kind had further options than
        option 0, with the number of options.
        """

    def choose(self, kind: str, key: str, options: Sequence[object]) -> int:
        """Choose an option at the next place of this key. Return the index of the option.

        Choices of other keys do not change the numbers of these places.
        """
        self.counts[key] += 1
        place = key, self.counts[key]
        choice = self._choose(kind, place, options)
        if choice:
            self.taken[place] = choice
            # Only the alternatives after the last disturbance count: the schedule without this
            # disturbance has noted the alternatives before it.
            self.alternatives.clear()
        elif len(options) > 1 and kind in self._noted:
            self.alternatives.append((place, len(options)))
        return choice

    def _choose(self, kind: str, place: Place, options: Sequence[object]) -> int:
        """Return the index of an option: replayed, by priorities, or at the rate of the kind.

        Option 0 is the ordinary behavior.
        """
        last = len(options) - 1
        if self.is_replay:
            replayed = self._replayed.get(place, 0)
            # The program may have changed since the first run, and may have fewer options here.
            return min(replayed, last)
        if kind == "order" and self._priorities is not None:
            return self._priorities.choose(options)
        rate = self._rates.get(kind, 0.0)
        # A place with a single option, or of a kind without a rate, draws no random number.
        if rate and last and self._random.random() < rate:
            return self._random.randint(1, last)
        return 0
