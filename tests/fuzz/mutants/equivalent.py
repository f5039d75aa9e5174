"""Faults that change no behaviour, by module, function and change, each with its reason."""

from __future__ import annotations

_SIGN = 'sign = 1 if self.mode == "min" else -1'

EQUIVALENT: dict[tuple[str, str, str], str] = {
    ("aiohooks/checkpoint/policies.py", "KeepBest.kept", f"{_SIGN}  =>  {_SIGN.replace('1 if', '2 if')}"): "only its sign counts",
    ("aiohooks/checkpoint/policies.py", "KeepBest.kept", f"{_SIGN}  =>  {_SIGN.replace('-1', '-2')}"): "only its sign counts",
}
