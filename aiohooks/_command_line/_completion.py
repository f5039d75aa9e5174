"""Completion in shells, by argcomplete: the one module that imports it."""

from __future__ import annotations

import argparse

from aiohooks.errors import missing_extra

try:
    from argcomplete import autocomplete
    from argcomplete.shell_integration import shellcode
except ImportError as error:
    raise missing_extra("completion", "completion") from error


def print_completion(shell: str) -> int:
    """Print what makes a shell ask the program `aiohooks` for completions."""
    print(shellcode(["aiohooks"], shell=shell))
    return 0


def complete(parser: argparse.ArgumentParser) -> None:
    """Answer the shell that has started this process for completions, and end the process."""
    autocomplete(parser)
