-- Every request of a Redis step store, done as a whole. It does what RunState (aiohooks/stores/_run_state.py) does;
-- tests/stores/test_redis_script.py sends the same requests to both.
--
-- KEYS: positions, changes (streams), state, members, answers (hashes); for 'wake' only the stream to wake
-- ARGV: the request, for how many milliseconds to keep the keys ('' for indefinitely), the arguments of the request

local request, keep_ms = ARGV[1], ARGV[2]

if request == 'wake' then
  redis.call('XADD', KEYS[1], 'MAXLEN', 1, '*', 'w', '')
  redis.call('PEXPIRE', KEYS[1], 60000)
  return 1
end

local positions_key, changes_key, state_key, members_key, answers_key = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local MAX_STEP = 9007199254740991
local MOST_WRITERS, WRITERS_AFTER_PURGE = 1280, 1024

-- tostring() would write a large number as 9.007199254741e+15.
local function integer(number)
  return string.format('%.0f', number)
end

local function position_of(id)
  local epoch, step = string.match(id, '^(%d+)-(%d+)$')
  return tonumber(epoch), tonumber(step)
end

-- The id of the only entry is the position of the run.
local epoch, step = 1, 0
local latest_entry = redis.call('XREVRANGE', positions_key, '+', '-', 'COUNT', 1)[1]
if latest_entry then
  epoch, step = position_of(latest_entry[1])
end
local known = redis.call('HMGET', state_key, 'term', 'revision')
local term, revision = tonumber(known[1] or 0), tonumber(known[2] or 0)

-- One string: clients take four times as long to read as many numbers.
local function reply(status, at_epoch, at_step)
  return string.format('%s %.0f %.0f %.0f %.0f', status, at_epoch or epoch, at_step or step, term, revision)
end

local function renew_expiry()
  if keep_ms ~= '' then
    for _, key in ipairs(KEYS) do
      redis.call('PEXPIRE', key, keep_ms)
    end
  end
end

-- Wakes the blocking reads of all processes.
local function publish_changes(count)
  if count > 0 then
    revision = revision + count
    local entry = redis.call('XADD', changes_key, 'MAXLEN', 1, '*', 'n', integer(revision))
    redis.call('HSET', state_key, 'revision', integer(revision), 'revision_entry', entry)
  end
end

local function set_term(new_term)
  term = new_term
  redis.call('HSET', state_key, 'term', integer(term))
end

-- The sequence number of a writer's last request, and the position that it led to.
local function last_answer(writer)
  local packed = redis.call('HGET', answers_key, writer)
  if packed then
    local seq, at_epoch, at_step = string.match(packed, '^(%d+) (%d+) (%d+)$')
    return assert(tonumber(seq)), at_epoch, at_step
  end
end

local function forget_silent_writers(writer)
  -- The position of a writer's last answer says how long it has been silent.
  local packed_answers, writers = redis.call('HGETALL', answers_key), {}
  for i = 1, #packed_answers, 2 do
    local _, at_epoch, at_step = string.match(packed_answers[i + 1], '^(%d+) (%d+) (%d+)$')
    if packed_answers[i] ~= writer then
      writers[#writers + 1] = {name = packed_answers[i], epoch = tonumber(at_epoch), step = tonumber(at_step)}
    end
  end
  table.sort(writers, function(a, b)
    if a.epoch ~= b.epoch then return a.epoch < b.epoch end
    if a.step ~= b.step then return a.step < b.step end
    return a.name < b.name
  end)
  for i = 1, #writers - (WRITERS_AFTER_PURGE - 1) do
    redis.call('HDEL', answers_key, writers[i].name)
  end
end

local function remember_answer(writer, seq, is_new)
  redis.call('HSET', answers_key, writer, integer(seq) .. ' ' .. integer(epoch) .. ' ' .. integer(step))
  if is_new and redis.call('HLEN', answers_key) > MOST_WRITERS then
    forget_silent_writers(writer)
  end
end

if request == 'write' then
  local kind, amount = ARGV[3], tonumber(ARGV[4])
  local floor_epoch, floor_step = tonumber(ARGV[5]), tonumber(ARGV[6])
  local writer_term, writer, seq = tonumber(ARGV[7]), ARGV[8], tonumber(ARGV[9])
  local last_seq, last_epoch, last_step = last_answer(writer)
  if last_seq and last_seq >= seq then
    return reply('ok', last_epoch, last_step)
  end
  local new_epoch, new_step = epoch, step
  if floor_epoch > epoch or (floor_epoch == epoch and floor_step > step) then
    new_epoch, new_step = floor_epoch, floor_step
  end
  if kind == 'advance' then
    new_step = new_step + amount
  elseif kind == 'raise' then
    new_step = math.max(new_step, amount)
  else
    new_epoch, new_step = new_epoch + 1, amount
  end
  if writer_term > 0 and writer_term < term then
    return reply('stale')
  end
  if new_step > MAX_STEP then
    return reply('full')
  end
  if writer_term > term then
    set_term(writer_term)
  end
  if new_epoch > epoch or new_step > step then
    epoch, step = new_epoch, new_step
    redis.call('XADD', positions_key, 'MAXLEN', 1, integer(epoch) .. '-' .. integer(step), 's', '')
  end
  remember_answer(writer, seq, not last_seq)
  if not last_seq then
    renew_expiry()
  end
  return reply('ok')
end

local time = redis.call('TIME')
local now_ms = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)

local function unpack_member(packed)
  local expires_ms, heartbeat, order, member_term, ready, text = string.match(packed, '^(%d+) (%d+) (%d+) (%d+) (%d) (.*)$')
  return {
    expires_ms = tonumber(expires_ms), heartbeat = tonumber(heartbeat), order = order,
    term = tonumber(member_term), ready = ready, text = text,
  }
end

local function put_member(id, ttl_ms, heartbeat, order, member_term, ready, text)
  if not order then
    order = redis.call('HINCRBY', state_key, 'order', 1)
  end
  local expires_ms = integer(now_ms + tonumber(ttl_ms))
  local fields = {expires_ms, integer(heartbeat), order, integer(member_term), ready, text}
  redis.call('HSET', members_key, id, table.concat(fields, ' '))
end

-- Whether a writer has sent this before; otherwise it counts as done from now on. A request numbered 0 is never repeated.
local function is_repeated(writer, seq)
  if seq == 0 then
    return false
  end
  local last_seq = last_answer(writer)
  if last_seq and last_seq >= seq then
    return true
  end
  remember_answer(writer, seq, not last_seq)
  return false
end

local function record_exit(name, at_step, error_text, lost)
  redis.call('HINCRBY', state_key, 'exits', 1)
  redis.call('HSET', state_key, 'exit_name', name, 'exit_step', at_step, 'exit_error', error_text, 'exit_lost', lost)
  publish_changes(1)
end

local function remove_expired_members()
  local packed_members, expired = redis.call('HGETALL', members_key), {}
  for i = 1, #packed_members, 2 do
    local member = unpack_member(packed_members[i + 1])
    if member.expires_ms <= now_ms then
      expired[#expired + 1] = {id = packed_members[i], expires_ms = member.expires_ms, text = member.text}
    end
  end
  table.sort(expired, function(a, b)
    if a.expires_ms ~= b.expires_ms then return a.expires_ms < b.expires_ms end
    return a.id < b.id
  end)
  for _, member in ipairs(expired) do
    redis.call('HDEL', members_key, member.id)
    record_exit(cjson.decode(member.text)[1], integer(step), '', '1')
  end
end

if request == 'read' or request == 'open' then
  if request == 'open' then
    -- Fails unless this server takes writes, and all keys are of this layout.
    redis.call('XREVRANGE', changes_key, '+', '-', 'COUNT', 1)
    redis.call('HLEN', answers_key)
    if latest_entry and latest_entry[2][1] ~= 's' then
      return redis.error_reply('FOREIGN the stream has entries that no store wrote')
    end
    redis.call('HSETNX', state_key, 'layout', '1')
    local layout = redis.call('HGET', state_key, 'layout')
    if layout ~= '1' then
      return redis.error_reply('FOREIGN the layout is ' .. layout)
    end
  end
  remove_expired_members()
  renew_expiry()
  return {epoch, step, redis.call('HGETALL', state_key), redis.call('HGETALL', members_key), now_ms}
end

if request == 'join' then
  local id, text, ttl_ms, member_term, ready = ARGV[3], ARGV[4], ARGV[5], tonumber(ARGV[6]), ARGV[7]
  local packed = redis.call('HGET', members_key, id)
  if member_term > 0 and member_term < term then
    publish_changes(redis.call('HDEL', members_key, id))
    return reply('ok')
  end
  local changes = 0
  if member_term > term then
    set_term(member_term)
  end
  if ready == '1' and tonumber(redis.call('HGET', state_key, 'ready') or 0) ~= member_term then
    redis.call('HSET', state_key, 'ready', integer(member_term))
    changes = 1
  end
  if packed then
    local before = unpack_member(packed)
    if before.text ~= text or before.term ~= member_term or before.ready ~= ready then
      changes = changes + 1
    end
    put_member(id, ttl_ms, before.heartbeat + 1, before.order, member_term, ready, text)
  else
    changes = changes + 1
    put_member(id, ttl_ms, 0, nil, member_term, ready, text)
  end
  publish_changes(changes)
elseif request == 'leave' then
  local id, name, at_step, error_text, writer, seq = ARGV[3], ARGV[4], ARGV[5], ARGV[6], ARGV[7], tonumber(ARGV[8])
  if not is_repeated(writer, seq) then
    local removed = redis.call('HDEL', members_key, id)
    if name ~= '' then
      record_exit(name, at_step, error_text, '0')
    else
      publish_changes(removed)
    end
  end
elseif request == 'lead' then
  local id, text, ttl_ms = ARGV[3], ARGV[4], ARGV[5]
  remove_expired_members()
  local packed_members, order, leads_already = redis.call('HGETALL', members_key), nil, false
  for i = 1, #packed_members, 2 do
    local member = unpack_member(packed_members[i + 1])
    if packed_members[i] == id then
      order, leads_already = member.order, member.term > 0
    elseif member.term > 0 then
      return reply('busy')
    end
  end
  if not leads_already then
    set_term(term + 1)
    put_member(id, ttl_ms, 0, order, term, '0', text)
    publish_changes(1)
  end
elseif request == 'fail' then
  local error_text, writer, seq = ARGV[3], ARGV[4], tonumber(ARGV[5])
  if not is_repeated(writer, seq) then
    redis.call('HSET', state_key, 'failure_error', error_text, 'failure_epoch', integer(epoch), 'failure_step', integer(step))
    publish_changes(1)
  end
else
  return redis.error_reply('ERR aiohooks: unknown request ' .. request)
end
renew_expiry()
return reply('ok')
