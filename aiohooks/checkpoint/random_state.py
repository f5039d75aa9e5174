"""`RandomState`: the states of random generators, so that a resumed run draws the same numbers."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from aiohooks.checkpoint.stateful import torch_support
from aiohooks.errors import CheckpointMismatchError, InvalidArgumentError

_Access = tuple[Callable[[], Any], Callable[[Any], object]]
"""How the state of a generator is read, and how it is set."""


class RandomState:
    """Keeps random generators in checkpoints: `Scaffold(tracked={"random": RandomState(), ...})`.

    Without arguments these are the global generators of Python's `random`, of numpy and of torch (also those of its CUDA
    devices, where CUDA is in use), as far as the program has imported them. Put it last among the tracked objects, so that
    loading the others draws no number after it.

    A data loader that other tasks run beside the steps should draw from a generator of its own, and have a state of its own.
    """

    def __init__(self, *generators: object) -> None:
        """Keep these generators instead of the global ones.

        Args:
            generators: instances of `random.Random`, `numpy.random.Generator` or `torch.Generator`.

        Raises:
            InvalidArgumentError: something else is given.
        """
        self._generators: list[_Access] = [_access(generator) for generator in generators]

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the generators."""
        if self._generators:
            return {"generators": [read() for read, _ in self._generators]}
        return {name: read() for name, (read, _) in _global_generators().items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from such states.

        Raises:
            CheckpointMismatchError: they are those of other generators, or of a package that is not imported here.
        """
        if self._generators:
            saved = cast("Sequence[Any]", state.get("generators", ()))
            if len(saved) != len(self._generators):
                raise CheckpointMismatchError(
                    f"the checkpoint has the states of {len(saved)} random generators, and RandomState has "
                    f"{len(self._generators)}; give it those that it had when it was saved"
                )
            for (_, write), one in zip(self._generators, saved, strict=True):
                write(one)
            return
        known = _global_generators()
        missing = [name for name in state if name not in known]
        if missing:
            raise CheckpointMismatchError(
                f"the checkpoint has the random state of {', '.join(missing)}, and here RandomState has {', '.join(known)}; "
                "import what the program imported that saved it, and give RandomState the same generators"
            )
        for name, one in state.items():
            known[name][1](one)


def _access(generator: Any) -> _Access:
    if isinstance(generator, random.Random):
        return generator.getstate, generator.setstate
    numpy = getattr(generator, "bit_generator", None)
    if numpy is not None:
        return lambda: numpy.state, lambda state: setattr(numpy, "state", state)
    if callable(getattr(generator, "get_state", None)) and callable(getattr(generator, "set_state", None)):
        return generator.get_state, generator.set_state
    raise InvalidArgumentError(
        f"RandomState got {generator!r}; give instances of random.Random, numpy.random.Generator or torch.Generator"
    )


def _global_generators() -> dict[str, _Access]:
    """Return those of the packages that the program has imported."""
    found: dict[str, _Access] = {"python": (random.getstate, random.setstate)}
    numpy, torch = cast("Any", sys.modules.get("numpy")), torch_support()
    if numpy is not None:
        found["numpy"] = (lambda: numpy.random.get_state(legacy=False)), numpy.random.set_state
    if torch is not None:
        found["torch"] = torch.random_state, torch.set_random_state
    return found
