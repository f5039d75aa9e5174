"""The step store without a session: wait for a step, or get the reason why it is never reached.

Usage: python examples/step_waiter.py
"""

import asyncio

import aiohooks as ah


async def trainer(steps: ah.StepStore) -> None:
    """Publish steps until a failure."""
    with steps.publisher("trainer"):
        for _ in range(3):
            await asyncio.sleep(0.01)  # the work of a step
            print(f"published step {await steps.advance()}")
        raise RuntimeError("out of memory")


async def evaluator(steps: ah.StepStore, step: int) -> None:
    """Wait for one step. The wait does not poll, and returns immediately if the step is reached
    already.
    """
    try:
        seen = await steps.wait_for(step, timeout=60)
        print(f"wanted step {step}: woken at step {seen}")
    except ah.errors.PublisherFailedError as error:
        print(f"wanted step {step}: {error}, because of: {error.__cause__}")


async def main() -> None:
    """Run one publisher and two waiters; the step of the second one is never reached."""
    steps = ah.MemoryStepStore()
    await asyncio.gather(
        evaluator(steps, 2), evaluator(steps, 10), trainer(steps), return_exceptions=True
    )
    await steps.aclose()


if __name__ == "__main__":
    ah.run(main)
