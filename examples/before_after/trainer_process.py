"""The trainer of `directory_poll`: a process that publishes two versions, prints so, and is killed.

Usage: python -m examples.before_after.trainer_process DIRECTORY files|store
"""

import asyncio
import sys
from pathlib import Path

import aiohooks as ah


async def main(directory: Path, how: str) -> None:
    """Publish versions as directories with a marker file, or as steps of a store."""
    if how == "files":
        for version in (1, 2):
            (directory / f"step_{version}").mkdir()
            (directory / f"step_{version}" / "STABLE").touch()
        print("published 2", flush=True)
        await asyncio.Event().wait()
    async with ah.open_step_store(f"local://{directory}", run="training") as versions:
        with versions.publisher("trainer"):
            await versions.raise_to(2)
            await versions.flush()  # from here on other processes know the publisher
            print("published 2", flush=True)
            await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2]))
