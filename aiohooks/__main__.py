"""The command line: `python -m aiohooks checkpoints DIR` and `python -m aiohooks plot RUN`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from aiohooks.checkpoint.cli import checkpoints


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m aiohooks", description="Inspect the files that sessions have written.")
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("checkpoints", help="list and verify checkpoints, and say which one a restore would read")
    command.add_argument("directory", help="the checkpoint directory; it is only read, and a session may be writing to it")
    command = commands.add_parser("plot", help="draw a PNG of a run that CSVHook or JSONLinesHook has written")
    command.add_argument("run", help="the .csv or .jsonl file")
    command.add_argument("-o", "--output", help="the PNG to write (default: beside the file)")
    given = parser.parse_args(arguments)
    if given.command == "checkpoints":
        return checkpoints(given.directory)
    from aiohooks.hooks._plot import plot  # needs an extra

    return plot(given.run, given.output)


if __name__ == "__main__":
    sys.exit(main())
