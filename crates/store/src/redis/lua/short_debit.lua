-- Debits of many counters: windows and buckets that are alone in their bundles, in the short forms of `scale.lua`, each debited
-- once. The same steps as in `step.lua`, without the tables and functions that the others need. If anything is in another form,
-- nothing is changed in the end, and `debit.lua` is called instead.
--
-- To read a counter costs as much as to add to it, so they are added to unread. The answer, the new state as a double, is exact
-- enough to see that nothing else was to be done: the window goes on, the bucket was not full, no maximum is reached. Where
-- that is not so, what was added is taken off again, and the counter is read and stepped. If it is not so for every third
-- counter of a limit, its others are read at once.
--
-- KEYS      the bundles; ARGV[1]: time (double, microseconds, or -1 for the server's own), then counters of one limit together,
-- in the order of their bundles: how many (uint16), the step (uint8), their short form as far as that never changes
-- (zero-terminated), capacity, length of the window, and the maximum count or how far ahead a bucket may be (doubles), then the
-- cost of each (doubles). Nobody reads what the bundles held before: returns the time, and a text, empty if they are debited.
local decode, match, text, sub, rep, type = struct.unpack, string.match, string.format, string.sub, string.rep, type
local ask, keys, call, try = ARGV[1], KEYS, redis.call, redis.pcall
local now, place = decode('<d', ask)
local fresh = 0
if now < 0 then
  local time = call('TIME')
  now = time[1] * 1000000 + time[2]
else
  -- As in `begin.lua`.
  fresh = 600000
end
if now < 1600000000000000 or now >= 4000000000000000 then
  return { now, 'general' }
end
local part, lives = now % 1000 / 1000, {}

-- Returns for how long a bucket is kept whose TAT is this.
local function life_of(tat)
  local last = tat - tat % 8388608 + 8388608
  local life = lives[last]
  if not life then
    life = (last - now) / 1000
    life = text('%d', life + (life / 16 + 8389) * part + fresh + 1)
    lives[last] = life
  end
  return life
end

-- More than a number changes in a double, twice: one of a bucket has 19 digits, one of a window 18.
local near_bucket, near_window = 2048, 64
-- What was added unread: key and number in turn.
local added, a = {}, 0

local function take_off(key, number)
  if call('INCRBY', key, text('%d', -number)) == 0 then
    -- There was none.
    call('DEL', key)
  end
end

-- Returns that another script is needed.
local function general()
  for i = 1, a, 2 do
    take_off(added[i], added[i + 1])
  end
  return { now, 'general' }
end

-- Of each limit its numbers, with how many of its counters are to be read and their costs; and the keys of all these.
local limits, unread, first, u = {}, {}, 0, 0
while place <= #ask do
  local n, op, short, b, d, f
  n, op, short, b, d, f, place = decode('<HBsddd', ask, place)
  local costs = { decode('<' .. rep('d', n), ask, place) }
  place = costs[n + 1]
  -- The state is the number times `sign`, less `zero`. Nothing else is to be done if it is at least `least` before and at
  -- most `most` after.
  local is_bucket, head, below = op == 1, nil, nil
  local near, sign, zero, least, most
  if is_bucket then
    near = near_bucket
    sign, zero = -1, short * -1000000000000000 - 1600000000000000
    least, most = now + near, now + (b + b < f and b + b or f) - near
    if most > 2600000000000000 - near then
      most = 2600000000000000 - near
    end
  else
    head = text(short, (now - now % d) / d)
    below = 10 ^ (18 - #head)
    sign, zero = 1, head * below
    -- The highest counts have no short form, so that no number of the window before is near this one's.
    below = below - 4096
    near = near_window
    least, most = -near, (f < below and f or below) - near
  end
  -- How many counters may still need reading before all are read at once.
  local m, last, number, shown = 0, nil, nil, nil
  -- Of small counters no answer could show it.
  local credit = most > least + near and 2 or -1
  for i = 1, n do
    local key, cost, is_done = keys[first + i], costs[i], false
    if credit >= 0 then
      if cost ~= last then
        last, number = cost, sign * cost
        shown = text('%d', number)
      end
      local answer = try('INCRBY', key, shown)
      if type(answer) == 'number' then
        local state = answer * sign - zero
        is_done = state - cost >= least and state <= most
        if is_done and is_bucket and (state + near) % 8388608 < cost + near + near then
          -- In another span than before: see `one_bucket.lua`. A user without leave to do this writes the whole instead.
          is_done = type(try('PEXPIRE', key, life_of(state + near))) == 'number'
        end
        if is_done then
          added[a + 1], added[a + 2], a = key, number, a + 2
        else
          take_off(key, number)
        end
      end
      credit = credit + (is_done and 1 or -2)
    end
    if not is_done then
      m, u = m + 1, u + 1
      costs[m], unread[u] = cost, key
    end
  end
  first = first + n
  if m > 0 then
    limits[#limits + 1] = { m, op, short, costs, b, d, f, head, below }
  end
end
if u == 0 then
  return { now, '' }
end

-- Costs become the new states. Of a counter whose expiry stays it is what it grows by, as a negative number; false if nothing
-- changes.
local kept = call('MGET', unpack(unread))
first = 0
for l = 1, #limits do
  local n, op, short, states, b, d, f, head, below = unpack(limits[l], 1, 9)
  if op == 1 then
    local most, furthest, pattern = now + b + b, now + f, '^%' .. short .. '(%d+)$'
    for i = 1, n do
      local value, state = kept[first + i], 0
      if value then
        state = #value == 20 and match(value, pattern)
        if not state then
          return general()
        end
        state = state + 1600000000000000
      elseif type(try('GET', unread[first + i])) == 'table' then
        -- MGET says nothing of a key of another type, which a write would replace; GET fails on it.
        return general()
      end
      local base = state > now and state or now
      local next = base + states[i]
      if next > most then
        next = base > most and base or most
      end
      if state > furthest or next >= 2600000000000000 then
        return general()
      end
      -- In the same span as before the expiry stays.
      states[i] = next ~= state and (next % 8388608 < next - state and next or state - next)
    end
  else
    local digits, pattern = #head, '^' .. head .. '(%d+)$'
    for i = 1, n do
      local value, state, is_new = kept[first + i], 0, false
      if not value then
        is_new = true
        if type(try('GET', unread[first + i])) == 'table' then
          return general()
        end
      else
        state = #value == 18 and match(value, pattern)
        if state then
          state = state + 0
        elseif #value ~= 18 or string.find(value, '%D') or sub(value, 1, 2) ~= sub(short, 1, 2)
          or sub(value, 3, digits) - sub(head, 3) > 0 then
          -- Another counter's, or ahead: a clock went back.
          return general()
        else
          state, is_new = 0, true
        end
      end
      local next = state + states[i]
      if next > f then
        next = state > f and state or f
      end
      if next >= below then
        return general()
      end
      -- Its window goes on, and so does its expiry.
      states[i] = next > state and (is_new and next or state - next)
    end
  end
  first = first + n
end

first = 0
for l = 1, #limits do
  local n, op, short, states, _, d, _, head = unpack(limits[l], 1, 8)
  -- Most counters grow alike.
  local life, grown, shown
  if op ~= 1 then
    life = (d - now % d) / 1000
    life = text('%d', life + (life / 16 + 100) * part + fresh + 1)
  end
  for i = 1, n do
    local state, key = states[i], unread[first + i]
    if not state then
      -- Nothing changes.
    elseif state < 0 then
      if state ~= grown then
        -- The number of a bucket is a negative one.
        grown, shown = state, text('%d', op == 1 and state or -state)
      end
      call('INCRBY', key, shown)
    elseif op ~= 1 then
      call('SET', key, head .. text('%0' .. 18 - #head .. 'd', state), 'PX', life)
    else
      call('SET', key, short .. text('%015d', state - 1600000000000000), 'PX', life_of(state))
    end
  end
  first = first + n
end
return { now, '' }
