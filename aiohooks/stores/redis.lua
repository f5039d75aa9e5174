-- What the server does as a whole for a Redis step store. A write is carried out here, as RunState (aiohooks/stores/engine.py)
-- does it; tests/stores/test_redis_script.py sends the same writes to both. All other changes are made by RunState itself, in a
-- process, which then replaces the state of the run if no other process was faster.
--
-- KEYS: positions, changes (streams), state, answers (hashes), the stream that ends the blocking read of the process
-- ARGV: the request, and the id of the run that the process knows ('' for none), with a space between them; the arguments of the
-- request

local request, known_run_id = string.match(ARGV[1], '^(%l+) (.*)$')
local positions_key, changes_key, state_key, answers_key, wake_key = unpack(KEYS)

if request == 'wake' then
  redis.call('XADD', wake_key, 'MAXLEN', 1, '*', 'w', '')
  redis.call('PEXPIRE', wake_key, 60000)
  return 1
end

local MAX_STEP = 9007199254740991
local MOST_WRITERS, WRITERS_AFTER_PURGE = 1280, 1024

-- Others may have put anything of any length into the keys: it is refused before more than its length is looked at, and shown
-- in a few characters, as clients do not read long errors.
local function foreign(what, found)
  error('FOREIGN ' .. what .. ' is ' .. string.gsub(string.sub(found, 1, 50), '%c', '?'), 0)
end

local function whole_number(text, what)
  local number = #text <= 16 and string.match(text, '^%d+$') and tonumber(text)
  if not number or number > MAX_STEP then
    foreign(what, text)
  end
  return number
end

-- tostring() would write a large number as 9.007199254741e+15.
local function integer(number)
  return string.format('%.0f', number)
end

-- The id of the only entry is the position of the run; its field is the id of the run.
local entry = redis.call('XREVRANGE', positions_key, '+', '-', 'COUNT', 1)[1]
local epoch, step, run_id = 1, 0, nil
if entry then
  local fields = entry[2]
  if #fields ~= 2 or fields[1] ~= 'run' then
    foreign('an entry of the stream, which no store of this version wrote,', table.concat(fields, ' ', 1, math.min(#fields, 4)))
  end
  local epoch_text, step_text = string.match(entry[1], '^(%d+)-(%d+)$')
  epoch, step = whole_number(epoch_text, 'the epoch'), whole_number(step_text, 'the step')
  run_id = fields[2]
end

local known = redis.call('HMGET', state_key, 'run', 'term', 'leader', 'version', 'layout')
if known[5] and known[5] ~= '3' then
  foreign('the layout', known[5])
end
for i, name in ipairs({'id', 'term', 'leader', 'version', 'layout'}) do
  if known[1] and not known[i] then
    foreign('the ' .. name .. ' in the state', 'missing')
  end
end
local term, leader, version = whole_number(known[2] or '0', 'the term'), known[3] or '', whole_number(known[4] or '0', 'the version')
local WRITE = '^(%l+) (%d+) (%d+) (%d+) (%d+) (%d+) (.*)$'
local kind, amount, floor_epoch, floor_step, writer_term, seq, writer
if request == 'write' then
  kind, amount, floor_epoch, floor_step, writer_term, seq, writer = string.match(ARGV[2], WRITE)
end
local kept = redis.call('HMGET', answers_key, 'run', request == 'write' and 'w ' .. writer or 'run')
-- Each key has the id of the run: if one of them is gone, the run is lost.
if run_id ~= known[1] or run_id ~= kept[1] then
  run_id = ''
end
run_id = run_id or ''

local function put_position()
  redis.call('XADD', positions_key, 'MAXLEN', 1, integer(epoch) .. '-' .. integer(step), 'run', run_id)
end

local function unpack_answer(packed)
  local at_seq, at_epoch, at_step = string.match(packed, '^(%d+) (%d+) (%d+)$')
  for _, text in ipairs({at_seq or packed, at_epoch, at_step}) do
    whole_number(text, 'a number of an answer')
  end
  return tonumber(at_seq), at_epoch, at_step
end

local function forget_silent_writers()
  local count = redis.call('HLEN', answers_key)
  if count <= MOST_WRITERS then
    return
  end
  if count > 4 * MOST_WRITERS then
    foreign('the number of the answers', integer(count))
  end
  -- The position of a writer's last answer says how long it has been silent.
  local packed_answers, writers = redis.call('HGETALL', answers_key), {}
  for i = 1, #packed_answers, 2 do
    if packed_answers[i] ~= 'run' and packed_answers[i] ~= 'w ' .. writer then
      local _, at_epoch, at_step = unpack_answer(packed_answers[i + 1])
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

local function write()
  amount, floor_epoch, floor_step = tonumber(amount), tonumber(floor_epoch), tonumber(floor_step)
  writer_term, seq = tonumber(writer_term), tonumber(seq)
  local function reply(status, at_epoch, at_step)
    return redis.status_reply(string.format('%s %s %s %.0f', status, at_epoch or integer(epoch), at_step or integer(step), term))
  end
  if run_id == '' or run_id ~= known_run_id then
    return reply('lost')
  end
  if kept[2] then
    local last_seq, last_epoch, last_step = unpack_answer(kept[2])
    if last_seq >= seq then
      last_epoch, last_step = tonumber(last_epoch), tonumber(last_step)
      if last_epoch > epoch or (last_epoch == epoch and last_step > step) then
        foreign('an answer, which is beyond the step,', kept[2])
      end
      return reply('ok', integer(last_epoch), integer(last_step))
    end
  end
  if floor_epoch > epoch or (floor_epoch == epoch and floor_step > step) then
    return reply('lost')
  end
  local new_epoch, new_step = epoch, step
  if kind == 'advance' then
    new_step = new_step + amount
  elseif kind == 'raise' then
    new_step = math.max(new_step, amount)
  else
    new_epoch, new_step = new_epoch + 1, amount
  end
  if writer_term > 0 and (writer_term ~= term or leader ~= writer) then
    return reply('stale')
  end
  if new_step > MAX_STEP then
    return reply('full')
  end
  local moves = new_epoch > epoch or new_step > step
  if new_epoch > epoch then
    -- A state that was read before is out of date: what a process brings after a loss depends on whether the step was reset.
    redis.call('HSET', state_key, 'version', integer(version + 1))
  end
  epoch, step = new_epoch, new_step
  local answer = string.format('%.0f %.0f %.0f', seq, epoch, step)
  if moves then
    put_position()
  end
  redis.call('HSET', answers_key, 'w ' .. writer, answer)
  if not kept[2] then
    forget_silent_writers()
  end
  return reply('ok')
end

-- Replaces the state if it is still that of the version `after`; returns the new version, or 0.
-- With another id, a new run replaces the old one.
local function swap()
  local found_run_id, after, new_run_id, data = ARGV[2], tonumber(ARGV[3]), ARGV[4], ARGV[5]
  local new_epoch, new_step, new_term, new_leader = tonumber(ARGV[6]), tonumber(ARGV[7]), ARGV[8], ARGV[9]
  local notifies = ARGV[10]
  if run_id ~= found_run_id or version ~= after then
    return 0
  end
  local is_new = new_run_id ~= run_id
  if is_new then
    redis.call('DEL', unpack(KEYS))
    redis.call('HSET', answers_key, 'run', new_run_id)
    run_id, version = new_run_id, 0
  end
  -- Writes since then have moved the step on: it is never moved back.
  local moves = new_epoch > epoch or (new_epoch == epoch and new_step > step)
  if moves then
    epoch, step = new_epoch, new_step
  end
  if moves or is_new then
    put_position()
  end
  local new_version = integer(version + 1)
  redis.call('HSET', state_key, 'layout', '3', 'run', run_id, 'version', new_version)
  redis.call('HSET', state_key, 'term', new_term, 'leader', new_leader, 'data', data)
  if notifies == '1' then
    redis.call('XADD', changes_key, 'MAXLEN', 1, new_version .. '-0', 'n', '')
  end
  return tonumber(new_version)
end

if request == 'write' then
  return write()
elseif request == 'swap' then
  return swap()
elseif request == 'read' then
  local change = redis.call('XREVRANGE', changes_key, '+', '-', 'COUNT', 1)[1]  -- fails unless it is a stream
  if change and run_id ~= '' and whole_number(string.match(change[1], '^%d+'), 'a change') > version then
    foreign('a change, which is later than the version ' .. integer(version) .. ',', change[1])
  end
  if run_id ~= '' then
    -- Fails where no write is accepted, on a replica or without memory: no lease could be renewed there, so none may run out.
    redis.call('HSET', answers_key, 'run', run_id)
  end
  local data = redis.call('HMGET', state_key, 'data')[1] or ''
  if run_id ~= '' and data == '' then
    foreign('the data in the state', 'missing')
  end
  return {run_id, version, data, epoch, step, term, leader}
end
return redis.error_reply('ERR aiohooks: unknown request ' .. request)
