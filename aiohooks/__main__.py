"""The command line: `python -m aiohooks checkpoints DIR` and `python -m aiohooks plot RUN`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from aiohooks.checkpoint.cli import checkpoints


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m aiohooks", description="Looks at what sessions have left on disk.")
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("checkpoints", help="list and verify checkpoints, and say which one a restore would take")
    command.add_argument("directory", help="the checkpoint directory; only read, also while a session writes there")
    command = commands.add_parser("plot", help="draw a run that CSVHook or JSONLinesHook has written, as a PNG")
    command.add_argument("run", help="the .csv or .jsonl file")
    command.add_argument("-o", "--output", help="the PNG to write; by default beside the file")
    given = parser.parse_args(arguments)
    if given.command == "checkpoints":
        return checkpoints(given.directory)
    from aiohooks.hooks._plot import plot  # needs an extra

    return plot(given.run, given.output)


if __name__ == "__main__":
    sys.exit(main())
