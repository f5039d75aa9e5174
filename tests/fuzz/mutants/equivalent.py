"""Faults that change no behaviour, by module, function and change, each with its reason."""

from __future__ import annotations

_EITHER = "return _KeepEither({}) if isinstance(other, KeepPolicy) else NotImplemented"
_READ = (
    'data = await self.call(self._read_range, f"{{name}}/{{_format.MANIFEST}}", 0,'
    " _format.MAX_MANIFEST_BYTES + {})"
)
_WARNED = (
    'warnings.warn(f"{{self!r}} was never closed; use `async with`", ResourceWarning,'
    " stacklevel={}, source=self)"
)
_STATFS = "result = (ctypes.c_long * {})()"
_COMPARED = "the numbers are only compared with each other"
_ON_DEVICE = "empty = torch.empty({}, dtype=kind, device=storage.device)"
_LONGEST = "longest = min(self.max_secs, self.initial_secs * 2.0 ** min(attempt - 1, {}))"

EQUIVALENT: dict[tuple[str, str, str], str] = {
    (
        "aiohooks/session/monitored.py",
        "AsyncMonitoredSession.__del__",
        f"{_WARNED.format(2)}  =>  {_WARNED.format(3)}",
    ): "whoever causes the collection is not the one to blame",
    (
        "aiohooks/checkpoint/_remote.py",
        "RemoteDirectory.read_manifest",
        f"{_READ.format(1)}  =>  {_READ.format(2)}",
    ): "what is longer is no manifest either way",
    (
        "aiohooks/checkpoint/policies.py",
        "KeepPolicy.__or__",
        f"{_EITHER.format('self, other')}  =>  {_EITHER.format('other, self')}",
    ): "a union has no order",
    (
        "aiohooks/stores/engine.py",
        "RunState._join",
        "self.revision += 1  =>  self.revision += 2",
    ): _COMPARED,
    (
        "aiohooks/stores/_connection.py",
        "Writes.__init__",
        "self._seq = 0  =>  self._seq = 1",
    ): _COMPARED,
    (
        "aiohooks/stores/base.py",
        "MemoryStepStore.advance_nowait",
        "if type(by) is not int or by < 1:  =>  if type(by) is not int or (by <= 1):",
    ): "1 is checked once more, and is right",
    (
        "aiohooks/stores/base.py",
        "MemoryStepStore.lead",
        "term = self._waits.snapshot.term + 1  =>  term = self._waits.snapshot.term + 2",
    ): _COMPARED,
    (
        "aiohooks/checkpoint/_torch.py",
        "tensor_in",
        f"{_ON_DEVICE.format(0)}  =>  {_ON_DEVICE.format(1)}",
    ): "`set_` replaces its memory",
    (
        "aiohooks/session/hook.py",
        "Merger._keep_merge",
        "if len(self._merges) >= _MOST_MERGES:  =>  if (len(self._merges) > _MOST_MERGES):",
    ): "one more is kept in memory",
    (
        "aiohooks/graph/session.py",
        "Session._plan",
        "if len(self._plans) >= _MOST_PLANS:  =>  if (len(self._plans) > _MOST_PLANS):",
    ): "one more is kept in memory",
    (
        "aiohooks/_core/waits.py",
        "Backoff.pause_secs",
        f"{_LONGEST.format(1000)}  =>  {_LONGEST.format(1001)}",
    ): "any exponent that a float can take is longer than the longest pause",
    (
        "aiohooks/_core/waits.py",
        "Backoff.pause_secs",
        (
            "return random.uniform(0, longest) if self.jitter else longest  =>  return"
            " random.uniform(longest, 0) if self.jitter else longest"
        ),
    ): "a random number between two others is so in either order",
    (
        "aiohooks/dispatch/interface.py",
        "Interface._check_method",
        "point.fitting.add(function)  =>  pass",
    ): "it is checked once more, and fits",
    (
        "aiohooks/stores/local/store.py",
        "remote_file_system",
        f"{_STATFS.format(64)}  =>  {_STATFS.format(65)}",
    ): "either is room to spare",
}
