"""How the script of the Redis step store is asked, and how its answers are read."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import Any, cast

from aiohooks.stores._protocol import (
    Answer,
    Fail,
    Failure,
    Join,
    LastExit,
    Lead,
    Leave,
    Member,
    Position,
    Request,
    Snapshot,
    Write,
)

LUA = r"""
local op = ARGV[1]
local keep_ms = ARGV[2]

if op == 'wake' then
  redis.call('XADD', KEYS[1], 'MAXLEN', 1, '*', 'w', '')
  redis.call('PEXPIRE', KEYS[1], 60000)
  return 1
end

local stream, news, state, members, answers = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]

local function exact(number)
  return string.format('%.0f', number)
end

local epoch, step = 1, 0
local last = redis.call('XREVRANGE', stream, '+', '-', 'COUNT', 1)[1]
if last then
  local e, s = string.match(last[1], '^(%d+)-(%d+)$')
  epoch, step = tonumber(e), tonumber(s)
end
local known = redis.call('HMGET', state, 'term', 'news')
local term, told = tonumber(known[1] or 0), tonumber(known[2] or 0)

-- In one piece: clients take their time with many small ones.
local function answer(status, e, s)
  return string.format('%s %.0f %.0f %.0f %.0f', status, e or epoch, s or step, term, told)
end

local function touch()
  if keep_ms ~= '' then
    for i = 1, 5 do
      redis.call('PEXPIRE', KEYS[i], keep_ms)
    end
  end
end

local function tell(changes)
  if changes > 0 then
    told = told + changes
    local id = redis.call('XADD', news, 'MAXLEN', 1, '*', 'n', exact(told))
    redis.call('HSET', state, 'news', exact(told), 'told', id)
  end
end

-- What came of a writer's last request: its number, epoch and step.
local function answered(writer)
  local before = redis.call('HGET', answers, writer)
  if before then
    local n, e, s = string.match(before, '^(%d+) (%d+) (%d+)$')
    return assert(tonumber(n)), e, s
  end
end

local function remember(writer, seq, is_new)
  redis.call('HSET', answers, writer, exact(seq) .. ' ' .. exact(epoch) .. ' ' .. exact(step))
  if is_new and redis.call('HLEN', answers) > 1280 then
    -- The position that came of a writer's last request says how long it has been silent.
    local all, writers = redis.call('HGETALL', answers), {}
    for i = 1, #all, 2 do
      local _, we, ws = string.match(all[i + 1], '^(%d+) (%d+) (%d+)$')
      if all[i] ~= writer then
        writers[#writers + 1] = {tonumber(we), tonumber(ws), all[i]}
      end
    end
    table.sort(writers, function(a, b)
      if a[1] ~= b[1] then return a[1] < b[1] end
      if a[2] ~= b[2] then return a[2] < b[2] end
      return a[3] < b[3]
    end)
    for i = 1, #writers - 1023 do
      redis.call('HDEL', answers, writers[i][3])
    end
  end
end

if op == 'write' then
  local kind, amount = ARGV[3], tonumber(ARGV[4])
  local floor_epoch, floor_step = tonumber(ARGV[5]), tonumber(ARGV[6])
  local by, writer, seq = tonumber(ARGV[7]), ARGV[8], tonumber(ARGV[9])
  local last, last_epoch, last_step = answered(writer)
  if last and last >= seq then
    return answer('ok', last_epoch, last_step)
  end
  local e, s = epoch, step
  if floor_epoch > e or (floor_epoch == e and floor_step > s) then
    e, s = floor_epoch, floor_step
  end
  if kind == 'advance' then
    s = s + amount
  elseif kind == 'raise' then
    s = math.max(s, amount)
  else
    e, s = e + 1, amount
  end
  if by > 0 and by < term then
    return answer('stale')
  end
  if s > 9007199254740991 then
    return answer('full')
  end
  if by > term then
    term = by
    redis.call('HSET', state, 'term', exact(term))
  end
  if e > epoch or s > step then
    epoch, step = e, s
    redis.call('XADD', stream, 'MAXLEN', 1, exact(e) .. '-' .. exact(s), 's', '')
  end
  remember(writer, seq, not last)
  if not last then
    touch()
  end
  return answer('ok')
end

local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)

local function unpacked(packed)
  local ends, heartbeat, order, by, ready, text = string.match(packed, '^(%d+) (%d+) (%d+) (%d+) (%d) (.*)$')
  return {ends = tonumber(ends), heartbeat = tonumber(heartbeat), order = order, term = tonumber(by), ready = ready, text = text}
end

local function put(id, ttl_ms, heartbeat, order, by, ready, text)
  if not order then
    order = redis.call('HINCRBY', state, 'order', 1)
  end
  local ends = exact(now + tonumber(ttl_ms))
  redis.call('HSET', members, id, table.concat({ends, exact(heartbeat), order, exact(by), ready, text}, ' '))
end

local function repeated(writer, seq)
  if seq == 0 then
    return false
  end
  local last = answered(writer)
  if last and last >= seq then
    return true
  end
  remember(writer, seq, not last)
  return false
end

local function departs(name, at, failure, lost)
  redis.call('HINCRBY', state, 'departures', 1)
  redis.call('HSET', state, 'd_name', name, 'd_step', at, 'd_error', failure, 'd_lost', lost)
  tell(1)
end

local function purge()
  local all, dead = redis.call('HGETALL', members), {}
  for i = 1, #all, 2 do
    local member = unpacked(all[i + 1])
    if member.ends <= now then
      dead[#dead + 1] = {member.ends, all[i], member.text}
    end
  end
  table.sort(dead, function(a, b)
    if a[1] ~= b[1] then return a[1] < b[1] end
    return a[2] < b[2]
  end)
  for _, one in ipairs(dead) do
    redis.call('HDEL', members, one[2])
    departs(cjson.decode(one[3])[1], exact(step), '', '1')
  end
end

if op == 'look' or op == 'open' then
  if op == 'open' then
    -- Also finds out whether this server may be written to, and whether all of this is ours, of this version.
    redis.call('XREVRANGE', news, '+', '-', 'COUNT', 1)
    redis.call('HLEN', answers)
    if last and last[2][1] ~= 's' then
      return redis.error_reply('FOREIGN the stream has entries that no store wrote')
    end
    redis.call('HSETNX', state, 'layout', '1')
    local layout = redis.call('HGET', state, 'layout')
    if layout ~= '1' then
      return redis.error_reply('FOREIGN the layout is ' .. layout)
    end
  end
  purge()
  touch()
  return {epoch, step, redis.call('HGETALL', state), redis.call('HGETALL', members), now}
end

if op == 'join' then
  local id, text, ttl_ms, by, ready = ARGV[3], ARGV[4], ARGV[5], tonumber(ARGV[6]), ARGV[7]
  local before = redis.call('HGET', members, id)
  if by > 0 and by < term then
    tell(redis.call('HDEL', members, id))
    return answer('ok')
  end
  local changes = 0
  if by > term then
    term = by
    redis.call('HSET', state, 'term', exact(by))
  end
  if ready == '1' and tonumber(redis.call('HGET', state, 'ready') or 0) ~= by then
    redis.call('HSET', state, 'ready', exact(by))
    changes = 1
  end
  if before then
    local was = unpacked(before)
    if was.text ~= text or was.term ~= by or was.ready ~= ready then
      changes = changes + 1
    end
    put(id, ttl_ms, was.heartbeat + 1, was.order, by, ready, text)
  else
    changes = changes + 1
    put(id, ttl_ms, 0, nil, by, ready, text)
  end
  tell(changes)
elseif op == 'leave' then
  if not repeated(ARGV[7], tonumber(ARGV[8])) then
    local id, name = ARGV[3], ARGV[4]
    local gone = redis.call('HDEL', members, id)
    if name ~= '' then
      departs(name, ARGV[5], ARGV[6], '0')
    else
      tell(gone)
    end
  end
elseif op == 'lead' then
  local id, text, ttl_ms = ARGV[3], ARGV[4], ARGV[5]
  purge()
  local all, order, mine = redis.call('HGETALL', members), nil, false
  for i = 1, #all, 2 do
    local member = unpacked(all[i + 1])
    if all[i] == id then
      order, mine = member.order, member.term > 0
    elseif member.term > 0 then
      return answer('busy')
    end
  end
  if not mine then
    term = term + 1
    redis.call('HSET', state, 'term', exact(term))
    put(id, ttl_ms, 0, order, term, '0', text)
    tell(1)
  end
elseif op == 'fail' then
  if not repeated(ARGV[4], tonumber(ARGV[5])) then
    redis.call('HSET', state, 'f_error', ARGV[3], 'f_epoch', exact(epoch), 'f_step', exact(step))
    tell(1)
  end
else
  return redis.error_reply('ERR aiohooks: unknown request ' .. op)
end
touch()
return answer('ok')
"""
SHA = hashlib.sha1(LUA.encode(), usedforsecurity=False).hexdigest()
"""How the server calls the script once it has it."""


_LATEST = 2**64 - 1  # the highest second half of an id: what comes after it is a later epoch


class Keys:
    """The keys of a run."""

    def __init__(self, run: str) -> None:
        """Of the run with this name."""
        # A brace in the name would end the hash tag, and the keys could come to lie on different nodes of a cluster.
        tag = run.replace("%", "%25").replace("{", "%7B").replace("}", "%7D")
        self.stream: str = f"aiohooks:{{{tag}}}"
        self.all: tuple[str, ...] = (self.stream, *(f"{self.stream}:{what}" for what in ("news", "state", "members", "answers")))

    @property
    def news(self) -> str:
        """The stream that tells of all but the mark."""
        return self.all[1]

    def wake(self, process: str) -> str:
        """The stream by which a process wakes its own blocking read."""
        return f"{self.stream}:wake:{process}"


def cursor(latest: Position, due: int, nobody: int) -> str:
    """From where to read the stream of positions: what comes after it is of interest to who waits for the step `due`."""
    if due >= nobody:
        return f"{latest.epoch}-{_LATEST}"
    return f"{latest.epoch}-{max(due - 1, latest.step)}"


def position_of(id: bytes | str) -> Position:
    """The position that is the id of an entry."""
    epoch, _, step = as_text(id).partition("-")
    return Position(int(epoch), int(step))


def arguments(request: Request) -> tuple[str | int, ...]:
    """What the script is to be given for a request, the keys and how long to keep them left out; first what to do."""
    if isinstance(request, Write):
        floor, term = request.floor, request.term
        return ("write", request.kind, request.amount, floor.epoch, floor.step, term, request.writer, request.seq)
    if isinstance(request, Join):
        member = request.member
        return ("join", member.id, _packed(member), _millis(member.ttl), member.term, int(member.ready))
    if isinstance(request, Leave):
        return ("leave", request.id, request.name, request.step, request.error, request.writer, request.seq)
    if isinstance(request, Lead):
        return ("lead", request.member.id, _packed(request.member), _millis(request.member.ttl))
    assert isinstance(request, Fail)
    return ("fail", request.error, request.writer, request.seq)


def answer_of(reply: Any) -> Answer:
    """What the script answered to a request."""
    status, *numbers = as_text(reply).split()
    epoch, step, term, revision = map(int, numbers)
    return Answer(cast("Any", status), Position(epoch, step), term, revision)


def snapshot_of(reply: Any, process: str) -> tuple[Snapshot, str]:
    """What the script answered when it was asked to look, as `process` sees it; and the id of the last news."""
    epoch, step, state, packed, now = reply
    known = _mapping(state)
    rows = sorted((_unpacked(id, text) for id, text in _mapping(packed).items()), key=lambda row: row[1])
    ends = [row[2] for row in rows if row[0].process != process]
    last_exit = failure = None
    if "d_name" in known:
        number, at, lost = int(known["departures"]), int(known["d_step"]), known["d_lost"] == "1"
        last_exit = LastExit(number, known["d_name"], at, known["d_error"], lost)
    if "f_error" in known:
        failure = Failure(known["f_error"], Position(int(known["f_epoch"]), int(known["f_step"])))
    term = int(known.get("term", 0))
    snapshot = Snapshot(
        Position(epoch, step),
        term,
        int(known.get("ready", 0)) == term > 0,
        int(known.get("news", 0)),
        tuple(row[0] for row in rows),
        last_exit,
        failure,
        # Its own leases it renews itself, and needs nobody to tell it that it is dead.
        max(0, min(ends) - now) / 1000 if ends else None,
    )
    return snapshot, known.get("told", "0-0")


def entries(reply: Any) -> Iterable[tuple[str, str]]:
    """The keys in an answer of XREAD, each with the id of its last entry; a list in RESP2, and a mapping in RESP3."""
    if not reply:
        return
    for key, found in reply.items() if hasattr(reply, "items") else reply:
        # Clients are not of one mind: in RESP3 the entries may be in one more list.
        last = found[-1]
        while isinstance(last[0], (list, tuple)):
            last = last[-1]
        yield as_text(key), as_text(last[0])


def as_text(value: Any) -> str:
    """Text of the server's; what is no text in it is shown."""
    return value.decode(errors="backslashreplace") if isinstance(value, bytes) else str(value)


def _millis(secs: float) -> int:
    return max(1, round(min(secs, 1e9) * 1000))


def _packed(member: Member) -> str:
    return json.dumps([member.name, member.ttl, member.waits_for])


def _unpacked(id: str, packed: str) -> tuple[Member, int, int]:
    """A member, its place in the order of arrival, and when its lease ends by the server's clock, in milliseconds."""
    ends, heartbeat, order, term, ready, text = packed.split(" ", 5)
    name, ttl, waits_for = json.loads(text)
    return Member(id, name, ttl, waits_for, int(term), ready == "1", int(heartbeat)), int(order), int(ends)


def _mapping(flat: Any) -> dict[str, str]:
    # A list in RESP3 too: scripts speak RESP2 unless they say otherwise.
    texts = [as_text(one) for one in flat]
    return dict(zip(texts[::2], texts[1::2], strict=True))
