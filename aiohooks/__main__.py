"""The command line, `python -m aiohooks`; see `aiohooks._command_line`."""

from __future__ import annotations

import sys

from aiohooks._command_line.parser import main

if __name__ == "__main__":
    sys.exit(main())
