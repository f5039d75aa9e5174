"""The step store alone, without a session: wait for a step, or be told why it will never come.

Usage: python examples/step_waiter.py
"""

import asyncio

import aiohooks as ah


async def trainer(steps: ah.StepStore) -> None:
    """Publishes steps until it fails."""
    with steps.publisher("trainer"):
        for _ in range(3):
            await asyncio.sleep(0.01)  # stands for the work of a step
            print(f"published step {await steps.advance()}")
        raise RuntimeError("out of memory")


async def evaluator(steps: ah.StepStore, step: int) -> None:
    """Waits for one step; nothing is polled, and a step that is already there costs nothing."""
    try:
        seen = await steps.wait_for(step, timeout=60)
        print(f"wanted step {step}: woken at step {seen}")
    except ah.PublisherFailedError as error:
        print(f"wanted step {step}: {error}, because of: {error.__cause__}")


async def main() -> None:
    """One who publishes, two who wait: the second in vain."""
    steps = ah.MemoryStepStore()
    await asyncio.gather(evaluator(steps, 2), evaluator(steps, 10), trainer(steps), return_exceptions=True)
    await steps.aclose()


if __name__ == "__main__":
    ah.run(main)
