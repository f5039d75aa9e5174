"""The adapters where the package that they are for is not installed."""

from __future__ import annotations

import importlib

import pytest

from tests.support.extras import hide


@pytest.mark.parametrize(
    ("package", "extra", "modules"),
    [
        ("tensorflow", "tensorflow", ["tensorflow"]),
        ("opentelemetry", "opentelemetry", ["opentelemetry"]),
        ("prometheus_client", "prometheus", ["prometheus"]),
        ("starlette", "asgi", ["asgi.app", "asgi"]),
        ("mlflow", "mlflow", ["trackers.mlflow"]),
        ("wandb", "wandb", ["trackers.wandb"]),
        ("tensorboardX", "tensorboard", ["trackers.tensorboard"]),
    ],
)
def test_the_extra_is_named(
    package: str, extra: str, modules: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Importing one raises an error with the `pip install` line."""
    names = [f"aiohooks.adapters.{module}" for module in modules]
    hide(
        monkeypatch,
        package,
        *names,
        *(["aiohooks.hooks._tensorboard"] if package == "tensorboardX" else []),
    )
    with pytest.raises(ImportError, match=rf"pip install 'aiohooks\[{extra}\]'"):
        importlib.import_module(names[-1])
