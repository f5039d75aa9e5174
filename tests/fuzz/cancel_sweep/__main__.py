"""The command: `python -m tests.fuzz.cancel_sweep`."""

import sys

from tests.fuzz.cancel_sweep.sweep import main

if __name__ == "__main__":
    sys.exit(main())
