"""Make docs/images/service-page.png: the page of examples/service.py in a headless Chromium, in the middle of a run.

python -m tests.fuzz.service_page docs/images/service-page.png
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from tests.support.chromium import Chromium
from tests.support.needs import find_program

STEP = 400


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.service_page", description=__doc__)
    parser.add_argument("file", type=Path)
    options = parser.parse_args(arguments)
    if find_program("chromium") is None:
        print("chromium is not installed; its package is called chromium", file=sys.stderr)
        return 2
    command = [sys.executable, "examples/service.py", "--port", "0", "--simulate", "1600"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        try:
            with Chromium() as chromium:
                chromium.open(url, width=1000, height=1060)
                chromium.wait_until("document.documentElement.dataset.state === 'running'")
                # Three waiters for a distant step, for the page to show; the end of the session answers them.
                for _ in range(3):
                    threading.Thread(target=_wait, args=(f"{url}steps/{100 * STEP}",), daemon=True).start()
                chromium.wait_until(f"Number(document.querySelector('#figures dd').textContent) >= {STEP}")
                chromium.screenshot(options.file)
        finally:
            process.terminate()
            process.stdout.read()
    return process.returncode


def _wait(url: str) -> None:
    with contextlib.suppress(OSError):  # 410: the session has stopped
        urllib.request.urlopen(url)


if __name__ == "__main__":
    sys.exit(main())
