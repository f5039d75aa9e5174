"""The smallest session: a step, a hook that observes it, and a loop that runs it.

Usage: python examples/first_session.py
"""

import aiohooks as ah


async def train_step(batch: float) -> dict[str, float]:
    """One step; each value that it returns can be fetched by name."""
    return {"loss": 1 / batch}


class BestLoss(ah.SessionRunHook):
    """Fetches the loss of each run and keeps the lowest."""

    best = float("inf")

    async def before_run(self, run_context: ah.SessionRunContext) -> ah.SessionRunArgs:
        return ah.SessionRunArgs("loss")

    async def after_run(
        self, run_context: ah.SessionRunContext, run_values: ah.SessionRunValues
    ) -> None:
        self.best = min(self.best, run_values.results)

    async def end(self, session: ah.Session) -> None:
        print(f"best loss after {session.global_step.latest.step} steps: {self.best}")


async def main() -> None:
    """Run one step for each batch."""
    async with ah.AsyncMonitoredSession(train_step, [BestLoss()]) as session:
        async for loss in session.steps("loss", feeds=[1, 2, 8, 4]):
            print(f"loss {loss}")


if __name__ == "__main__":
    ah.run(main)
