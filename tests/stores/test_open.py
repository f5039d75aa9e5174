"""open_step_store: the step store of a URL."""

from __future__ import annotations

import pytest

import aiohooks as ah


def test_invalid_urls_and_options_are_refused() -> None:
    """A URL of no kind of store is refused with a suggestion; an unknown option, by name."""
    for url, message in {
        "redos://h": "unknown kind of step store 'redos'; did you mean 'redis'",
        "nothing": "'nothing' has no ://",
        "redis:/user:secret@h": "'redis' has no ://; give the URL of a step store, such as",
        "": "'' has no ://",
        "local://runs": "'local://runs' has no absolute path; give local:///directory",
        "memory://runs": "'memory://runs' has an address; give memory://",
        "ray://head:10001": "not of the form ray://namespace; .* to ray.init",
        "ray://space/digits": "not of the form ray://namespace; .* as run=",
    }.items():
        with pytest.raises(ah.errors.InvalidArgumentError, match=message):
            ah.open_step_store(url)
    for url, message in {
        "memory://": "a memory step store has no option 'hartbeat'; it takes none",
        "local://": ("a local step store has no option 'hartbeat'; known are: on_lost"),
        "redis://h": "invalid for Redis: there is no option 'hartbeat'; .* lease_secs, heartbeat",
    }.items():
        with pytest.raises(ah.errors.InvalidArgumentError, match=message):
            ah.open_step_store(url, hartbeat=3)
    with pytest.raises(ah.errors.InvalidArgumentError, match="url is 7"):
        ah.open_step_store(7)  # type: ignore[arg-type]


def test_url_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """If left out, URL and run come from the environment."""
    monkeypatch.delenv("AIOHOOKS_STEP_STORE", raising=False)
    with pytest.raises(ah.errors.InvalidArgumentError, match="AIOHOOKS_STEP_STORE"):
        ah.open_step_store()
    monkeypatch.setenv("AIOHOOKS_STEP_STORE", "memory://")
    monkeypatch.setenv("AIOHOOKS_RUN", "digits-7")
    store = ah.open_step_store()
    assert isinstance(store, ah.MemoryStepStore)
    assert store.run == "digits-7"
    assert ah.open_step_store(run="other").run == "other"
