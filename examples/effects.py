"""Effects of a training that you kill and restart: the receiver gets those of each kept step.

Usage: python examples/effects.py RECEIVER FOLDER [URL] [--steps 20] [--pause 0.05]

RECEIVER is one of the following; webhook needs httpx, and redis needs the extra of that name. Kill
the program at any time, start it again, and compare the result:
    database   one row for each step, in an SQLite file in FOLDER: exactly once, because the key of
               the effect is the primary key of the table
    webhook    a POST to URL for each step, with the header Idempotency-Key: at least once, under
               the same key
    weights    steps published in the step store at URL, such as local:///tmp/versions, after their
               checkpoint is durable
    redis      entries of the stream "batches" at URL, each acknowledged when a checkpoint contains
               the step that used it
"""

import argparse
import asyncio
import contextlib
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohooks as ah

Handler = Callable[[ah.hooks.Effect], Awaitable[object]]
Receiver = AsyncIterator[tuple[Handler, "Batches"]]


class Batches:
    """Batches by number. Their position is tracked: a repeated step gets the same batch."""

    def __init__(self) -> None:
        self.position = 0

    async def __aiter__(self) -> AsyncIterator[Any]:
        async for number, batch in self.read():
            # A step that is kept has used the others; their acknowledgement is pending.
            if number > self.position:
                self.position = number
                yield batch

    async def read(self) -> AsyncIterator[tuple[int, Any]]:
        number = self.position
        while True:
            number += 1
            yield number, number

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


@contextlib.asynccontextmanager
async def database(folder: Path, url: str) -> Receiver:
    """Insert a row with the key in one transaction, unless the table has it already."""

    def insert(effect: ah.hooks.Effect) -> None:
        with contextlib.closing(sqlite3.connect(folder / "steps.db")) as connection, connection:
            connection.execute(
                "CREATE TABLE IF NOT EXISTS steps (key TEXT PRIMARY KEY, step INTEGER, batch"
                " INTEGER)"
            )
            connection.execute(
                "INSERT OR IGNORE INTO steps VALUES (?, ?, ?)",
                (effect.key, effect.step, effect.payload),
            )

    async def row(effect: ah.hooks.Effect) -> None:
        await asyncio.to_thread(insert, effect)

    yield row, Batches()


@contextlib.asynccontextmanager
async def webhook(folder: Path, url: str) -> Receiver:
    """Post the step; the service recognizes a repetition by the key."""
    import httpx

    async with httpx.AsyncClient() as client:

        async def post(effect: ah.hooks.Effect) -> None:
            response = await client.post(
                url, json={"step": effect.step}, headers={"Idempotency-Key": effect.key}
            )
            response.raise_for_status()  # after an error, the step is posted again

        yield post, Batches()


@contextlib.asynccontextmanager
async def weights(folder: Path, url: str) -> Receiver:
    """Publish the version. Workers behind a `VersionGate` can load its checkpoint, which exists and
    is never undone.
    """
    async with ah.open_step_store(url, run="versions") as versions:

        async def publish(effect: ah.hooks.Effect) -> None:
            await versions.raise_to(effect.step)  # no change in a repetition

        yield publish, Batches()


@contextlib.asynccontextmanager
async def redis(folder: Path, url: str) -> Receiver:
    """Read a stream as a consumer group, and acknowledge the entries of steps in a checkpoint.

    A new process gets the other entries again.
    """
    from redis.asyncio import Redis
    from redis.exceptions import ResponseError

    class Entries(Batches):
        async def read(self) -> AsyncIterator[tuple[int, Any]]:
            start = "0"  # first the entries that this consumer got and did not acknowledge
            while True:
                answer = await client.xreadgroup(
                    "trainers", "chief", {"batches": start}, count=10, block=1000
                )
                entries = answer[0][1] if answer else []
                for name, _ in entries:
                    milliseconds, number = map(int, name.split("-"))
                    yield milliseconds * 1_000_000 + number, name
                start = entries[-1][0] if entries and start != ">" else ">"

    client: Any
    async with Redis.from_url(url, decode_responses=True) as client:
        try:
            await client.xgroup_create("batches", "trainers", id="0", mkstream=True)
        except ResponseError as error:
            if "BUSYGROUP" not in str(error):  # otherwise the group exists
                raise

        async def acknowledge(effect: ah.hooks.Effect) -> None:
            await client.xack("batches", "trainers", effect.payload)

        yield acknowledge, Entries()


RECEIVERS = {"database": database, "webhook": webhook, "weights": weights, "redis": redis}


async def main(receiver: str, folder: Path, url: str, steps: int, pause: float) -> None:
    """Train until the last step; effects are delivered when a checkpoint contains their step."""

    async def train(batch: Any) -> None:
        await asyncio.sleep(pause)
        ah.effect("step", batch)

    async with RECEIVERS[receiver](folder, url) as (deliver, batches):
        creator = ah.ChiefSessionCreator(
            train,
            checkpoint_dir=folder / "checkpoints",
            scaffold=ah.Scaffold(tracked={"batches": batches}),
        )
        hooks = [
            ah.hooks.EffectsHook({"step": deliver}, run="example"),
            ah.CheckpointSaverHook(every=ah.Every(steps=5)),
            ah.StopAtStepHook(last_step=steps),
        ]
        async with ah.AsyncMonitoredSession(creator, hooks) as session:
            async for _ in session.steps(feeds=batches):
                print("step", session.global_step.latest.step, flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("receiver", choices=RECEIVERS)
    parser.add_argument("folder", type=Path, help="for checkpoints and the database file")
    parser.add_argument("url", nargs="?", default="", help="for all receivers except database")
    parser.add_argument("--steps", type=int, default=20, help="the last step (20)")
    parser.add_argument("--pause", type=float, default=0.05, help="seconds of each step (0.05)")
    options = parser.parse_args()
    if not options.url and options.receiver != "database":
        parser.error(f"{options.receiver} needs a URL")
    options.folder.mkdir(parents=True, exist_ok=True)
    ah.run(main, options.receiver, options.folder, options.url, options.steps, options.pause)
