"""The command line: `python -m aiohooks checkpoints DIR` and `python -m aiohooks plot RUN`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from aiohooks.checkpoint.cli import checkpoints
from aiohooks.hooks._lanes_text import plot_in_terminal


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m aiohooks", description="Inspect the files that sessions have written.")
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("checkpoints", help="list and verify checkpoints, and say which one a restore would read")
    command.add_argument(
        "directory", help="the directory, or the URL of a mirror; it is only read, and a session may be writing to it"
    )
    command = commands.add_parser(
        "plot", help="draw a run that CSVHook or JSONLinesHook has written, or the lanes of TimelineHook"
    )
    command.add_argument("run", help="the .csv or .jsonl file, or the .json of a trace")
    command.add_argument("-o", "--output", help="the PNG to write (default: beside the file)")
    command.add_argument("--terminal", action="store_true", help="draw the lanes of a trace as text, and write no PNG")
    command.add_argument("--steps", type=_count, metavar="N", help="draw the last N steps of a trace (default: all)")
    given = parser.parse_args(arguments)
    if given.command == "checkpoints":
        return checkpoints(given.directory)
    if given.terminal:
        return plot_in_terminal(given.run, given.steps)
    from aiohooks.hooks._plot import plot  # needs an extra

    return plot(given.run, given.output, given.steps)


def _count(text: str) -> int:
    count = int(text)
    if count < 1:
        raise argparse.ArgumentTypeError("give a number of at least 1")
    return count


if __name__ == "__main__":
    sys.exit(main())
