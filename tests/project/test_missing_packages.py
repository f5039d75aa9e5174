"""Where a package is missing, what needs it says which extra to install.

The hooks that need a package are in `tests/hooks/test_conformance.py`.
"""

from __future__ import annotations

import pytest

from tests.support.processes import run_python

USES = [
    ("tensorflow", "tensorflow", "import aiohooks.adapters.tensorflow"),
    ("opentelemetry", "opentelemetry", "import aiohooks.adapters.opentelemetry"),
    ("prometheus_client", "prometheus", "import aiohooks.adapters.prometheus"),
    ("starlette", "asgi", "import aiohooks.adapters.asgi"),
    ("mlflow", "mlflow", "import aiohooks.adapters.trackers.mlflow"),
    ("wandb", "wandb", "import aiohooks.adapters.trackers.wandb"),
    ("tensorboardX", "tensorboard", "import aiohooks.adapters.trackers.tensorboard"),
    ("redis", "redis", "import aiohooks; aiohooks.open_step_store('redis://x')"),
    ("ray", "ray", "import aiohooks; aiohooks.open_step_store('ray://x', run='r')"),
    ("numpy", "checkpoint", "from aiohooks import checkpoint as c; c.Saver('x')"),
    ("msgspec", "checkpoint", "from aiohooks import checkpoint as c; c.Saver('x')"),
    (
        "fsspec",
        "fsspec",
        "from aiohooks import checkpoint as c; c.Saver('x'); c.Saver('x', mirror='memory://x')",
    ),
]


@pytest.mark.parametrize(("package", "extra", "use"), USES)
def test_the_extra_is_named(package: str, extra: str, use: str) -> None:
    """The first use raises an ImportError with the `pip install` line. The keep policies of
    checkpoints need no package.
    """
    hidden = f"import sys; sys.modules[{package!r}] = None"
    policies = "from aiohooks.checkpoint import KeepNewest; KeepNewest(3)"
    ended = run_python("-c", f"{hidden}; {policies}; {use}")
    assert "ImportError: " in ended.stderr
    assert f"pip install 'aiohooks[{extra}]'" in ended.stderr
