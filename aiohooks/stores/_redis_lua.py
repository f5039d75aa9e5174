"""The script that does every request of a step store inside a Redis server; it does what `RunState` does.

A run has five keys, all with the same hash tag:

    aiohooks:{run}            a stream of one entry, whose id is the mark: epoch-step. A blocking read from just below our
                              threshold ends when the step is there, or in a later epoch, and not before.
    aiohooks:{run}:news       a stream of one entry, a new one for each change of all the rest
    aiohooks:{run}:state      the layout, reign, ready, counts, the last departure, the failure
    aiohooks:{run}:members    by id: when the lease ends, renewals, order, reign, ready, and the rest as JSON
    aiohooks:{run}:answers    by writer: the number of its last request, and the mark that came of it

and for a minute `aiohooks:{run}:wake:...`, by which a process tells its own blocking read of a lower threshold.
"""

from __future__ import annotations

import hashlib

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
local known = redis.call('HMGET', state, 'reign', 'news')
local reign, told = tonumber(known[1] or 0), tonumber(known[2] or 0)

-- In one piece: clients take their time with many small ones.
local function answer(verdict, e, s)
  return string.format('%s %.0f %.0f %.0f %.0f', verdict, e or epoch, s or step, reign, told)
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
    -- The mark that came of a writer's last request says how long it has been silent.
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
  if by > 0 and by < reign then
    return answer('stale')
  end
  if s > 9007199254740991 then
    return answer('full')
  end
  if by > reign then
    reign = by
    redis.call('HSET', state, 'reign', exact(reign))
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
  local ends, beat, order, by, ready, text = string.match(packed, '^(%d+) (%d+) (%d+) (%d+) (%d) (.*)$')
  return {ends = tonumber(ends), beat = tonumber(beat), order = order, reign = tonumber(by), ready = ready, text = text}
end

local function put(id, ttl_ms, beat, order, by, ready, text)
  if not order then
    order = redis.call('HINCRBY', state, 'order', 1)
  end
  local ends = exact(now + tonumber(ttl_ms))
  redis.call('HSET', members, id, table.concat({ends, exact(beat), order, exact(by), ready, text}, ' '))
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
  if by > 0 and by < reign then
    tell(redis.call('HDEL', members, id))
    return answer('ok')
  end
  local changes = 0
  if by > reign then
    reign = by
    redis.call('HSET', state, 'reign', exact(by))
  end
  if ready == '1' and tonumber(redis.call('HGET', state, 'ready') or 0) ~= by then
    redis.call('HSET', state, 'ready', exact(by))
    changes = 1
  end
  if before then
    local was = unpacked(before)
    if was.text ~= text or was.reign ~= by or was.ready ~= ready then
      changes = changes + 1
    end
    put(id, ttl_ms, was.beat + 1, was.order, by, ready, text)
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
      order, mine = member.order, member.reign > 0
    elseif member.reign > 0 then
      return answer('busy')
    end
  end
  if not mine then
    reign = reign + 1
    redis.call('HSET', state, 'reign', exact(reign))
    put(id, ttl_ms, 0, order, reign, '0', text)
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
