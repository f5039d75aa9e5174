"""Modules, optimizers and generators of torch, tracked by a session: saved, restored, or refused
when the session is made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import aiohooks as ah
from aiohooks.checkpoint import Saver
from aiohooks.errors import InvalidArgumentError
from tests.support.saving_sessions import HeldSaver
from tests.support.sessions import make_runs, run_session, use_up
from tests.support.tensors import same_tensors


class Training:
    """A small network with all that training changes."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(4, 8),
            torch.nn.BatchNorm1d(8),
            torch.nn.Dropout(),
            torch.nn.Linear(8, 1),
        )
        self.average = torch.optim.swa_utils.AveragedModel(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [3, 6])
        self.scaler = torch.amp.GradScaler("cpu")
        self.data = torch.Generator().manual_seed(2)
        self.losses: list[float] = []

    async def step(self) -> None:
        """Train on one batch."""
        loss = self.model(torch.randn(16, 4, generator=self.data)).square().mean()
        self.optimizer.zero_grad()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()
        self.average.update_parameters(self.model)
        self.losses.append(loss.item())

    async def run(self, checkpoint_dir: Path, until: int) -> None:
        """Train to a step in a session, from the newest checkpoint."""
        names = ("model", "average", "optimizer", "scheduler", "scaler")
        tracked: dict[str, Any] = {name: getattr(self, name) for name in names}
        tracked |= {
            "data": ah.checkpoint.RandomState(self.data),
            "random": ah.checkpoint.RandomState(),
        }
        creator = ah.ChiefSessionCreator(
            self.step, scaffold=ah.Scaffold(tracked=tracked), checkpoint_dir=checkpoint_dir
        )
        hooks = [
            ah.StopAtStepHook(last_step=until),
            ah.CheckpointSaverHook(every=ah.Every(steps=3)),
        ]
        async with ah.AsyncMonitoredSession(creator, hooks) as session:
            await use_up(session.steps())


async def test_a_resumed_training_has_the_same_bits(tmp_path: Path) -> None:
    """Weights, averages, rates, scale, batches and dropout are those of a training that was not
    interrupted.
    """
    whole = Training()
    await whole.run(tmp_path / "whole", until=10)
    first = Training()
    await first.run(tmp_path / "parts", until=4)
    second = Training()
    await second.run(tmp_path / "parts", until=10)
    assert first.losses + second.losses == whole.losses
    assert same_tensors(second.model.state_dict(), whole.model.state_dict())
    assert same_tensors(second.average.state_dict(), whole.average.state_dict())
    assert same_tensors(second.optimizer.state_dict(), whole.optimizer.state_dict())


class Weights:
    """A tracked object whose tensors, of which one is a view of the other, are changed in place."""

    def __init__(self) -> None:
        self.values = torch.zeros(1000)

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values, "rows": self.values.view(10, -1)}

    def load_state_dict(self, state: Any) -> None:
        self.values = state["values"]

    async def step(self) -> None:
        """Change every element."""
        self.values.add_(1)


async def test_training_continues_during_a_write(tmp_path: Path) -> None:
    """The checkpoint has the weights of its step, whatever the steps change in place while it is
    written.
    """
    weights = Weights()
    saver = HeldSaver(tmp_path)
    creator = ah.ChiefSessionCreator(
        weights.step, scaffold=ah.Scaffold(tracked={"weights": weights})
    )
    hook = ah.CheckpointSaverHook(
        saver, every=ah.Every(at=(2,)), save_on_begin=False, save_on_end=False
    )
    async with saver, ah.AsyncMonitoredSession(creator, [hook]) as session:
        await make_runs(session, 5, "step")
        saver.let()
    restored = await Saver(tmp_path, read_only=True).restore()
    assert restored is not None
    assert restored.checkpoint.step == 2
    assert restored.state["tracked"]["weights"]["values"].tolist() == [2.0] * 1000


async def test_memory_of_a_snapshot_is_used_again() -> None:
    """By the next one when nothing refers to it any more, and not before."""
    weights = Weights()
    session = ah.Session(ah.Graph())
    session.tracked = {"one": weights, "other": weights}

    def taken() -> torch.Tensor:
        states = session.state_dict()["tracked"]
        assert states["one"]["values"].data_ptr() == states["other"]["rows"].data_ptr()
        found: torch.Tensor = states["other"]["rows"]
        return found

    first = taken()
    weights.values.add_(1)
    second = taken()
    assert (first == 0).all()
    assert (second == 1).all()
    place = second.data_ptr()
    del second
    weights.values.add_(1)
    third = taken()
    assert third.data_ptr() == place
    assert (third == 2).all()
    weights.values = torch.zeros(
        100_000
    )  # a larger state needs other memory, and leaves this one alone
    assert taken().shape == (10, 10_000)
    assert (third == 2).all()


# What a single file cannot hold is refused when the session is made


@pytest.fixture
def one_process() -> Iterator[None]:
    """A process group of this process alone."""
    torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def sharded() -> torch.nn.Module:
    """A module whose parameters are DTensors."""
    model = torch.nn.Linear(4, 4)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    return model


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            sharded,
            (r"^state\['tracked'\]\['model'\]\['weight'\] is a tensor of the type DTensor"),
        ),
        (
            lambda: torch.nn.Linear(2, 2, device="meta"),
            r"^state\['tracked'\]\['model'\]\['weight'\] is a tensor of .* meta, which",
        ),
    ],
)
async def test_shards_are_refused_when_the_session_is_made(
    make: Callable[[], Any], message: str, tmp_path: Path
) -> None:
    """Also if the first save would be much later; the message has the name of the entry, and what
    saves it instead.
    """
    steps = 0

    async def step() -> None:
        nonlocal steps
        steps += 1

    creator = ah.ChiefSessionCreator(
        step, scaffold=ah.Scaffold(tracked={"model": make()}), checkpoint_dir=tmp_path
    )
    hook = ah.CheckpointSaverHook(save_on_begin=False)
    with pytest.raises(InvalidArgumentError, match=message + ".*torch.distributed.checkpoint"):
        await run_session(ah.AsyncMonitoredSession(creator, [hook]), 1, "step")
    assert steps == 0
    assert await Saver(tmp_path, read_only=True).checkpoints() == []
