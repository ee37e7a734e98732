-- Debits of many counters: windows and buckets that are alone in their bundles, in the short forms of `scale.lua`, each debited
-- once. The same steps as in `step.lua`, without the tables and functions that the others need. If anything is in another form,
-- nothing is written, and `debit.lua` is called instead.
--
-- KEYS      the bundles; ARGV[1]: time (double, microseconds, or -1 for the server's own), then counters of one limit together,
-- in the order of their bundles: how many (uint16), the step (uint8), their short form as far as that never changes
-- (zero-terminated), capacity, length of the window, and the maximum count or how far ahead a bucket may be (doubles), then the
-- cost of each (doubles). Nobody reads what the bundles held before: returns the time, and a text, empty if they are debited.
local decode, match, text, sub, rep = struct.unpack, string.match, string.format, string.sub, string.rep
local ask, keys, call = ARGV[1], KEYS, redis.call
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
local kept = call('MGET', unpack(keys))

-- Of each limit: how many counters, its window (false: buckets), its short form, and the new state of each counter. Of a counter
-- whose expiry stays it is what it grows by, as a negative number; false if nothing changes.
local limits, first = {}, 0
while place <= #ask do
  local n, op, short, b, d, f
  n, op, short, b, d, f, place = decode('<HBsddd', ask, place)
  local states = { decode('<' .. rep('d', n), ask, place) }
  place = states[n + 1]
  local window = false
  if op == 1 then
    local most, furthest, pattern = now + b + b, now + f, '^%' .. short .. '(%d+)$'
    for i = 1, n do
      local value, state = kept[first + i], 0
      if value then
        state = #value == 20 and match(value, pattern)
        if not state then
          return { now, 'general' }
        end
        state = state + 1600000000000000
      else
        -- MGET says nothing of a key of another type, which a write would replace; GET fails on it.
        call('GET', keys[first + i])
      end
      local base = state > now and state or now
      local next = base + states[i]
      if next > most then
        next = base > most and base or most
      end
      if state > furthest or next >= 2600000000000000 then
        return { now, 'general' }
      end
      -- In the same span as before the expiry stays: see `one_bucket.lua`.
      states[i] = next ~= state and (next % 8388608 < next - state and next or state - next)
    end
  else
    local start = now - now % d
    local head = text(short, start / d)
    local digits, below, pattern = #head, 10 ^ (18 - #head), '^' .. head .. '(%d+)$'
    window = { head, '%0' .. 18 - digits .. 'd', start + d }
    for i = 1, n do
      local value, state, is_new = kept[first + i], 0, false
      if not value then
        is_new = true
        call('GET', keys[first + i])
      else
        state = #value == 18 and match(value, pattern)
        if state then
          state = state + 0
        elseif #value ~= 18 or string.find(value, '%D') or sub(value, 1, 2) ~= sub(short, 1, 2)
          or sub(value, 3, digits) - sub(head, 3) > 0 then
          -- Another counter's, or ahead: a clock went back.
          return { now, 'general' }
        else
          state, is_new = 0, true
        end
      end
      local next = state + states[i]
      if next > f then
        next = state > f and state or f
      end
      if next >= below then
        return { now, 'general' }
      end
      -- Its window goes on, and so does its expiry.
      states[i] = next > state and (is_new and next or state - next)
    end
  end
  limits[#limits + 1] = { n, window, short, states }
  first = first + n
end

local part, c, lives = now % 1000 / 1000, 0, {}
for l = 1, #limits do
  local limit = limits[l]
  local n, window, short, states = limit[1], limit[2], limit[3], limit[4]
  -- Most counters grow alike.
  local life, grown, shown
  if window then
    life = (window[3] - now) / 1000
    life = text('%d', life + (life / 16 + 100) * part + fresh + 1)
  end
  for i = 1, n do
    local state = states[i]
    c = c + 1
    if not state then
      -- Nothing changes.
    elseif state < 0 then
      if state ~= grown then
        -- The number of a bucket is a negative one.
        grown, shown = state, text('%d', window and -state or state)
      end
      call('INCRBY', keys[c], shown)
    elseif window then
      call('SET', keys[c], window[1] .. text(window[2], state), 'PX', life)
    else
      local last = state - state % 8388608 + 8388608
      life = lives[last]
      if not life then
        life = (last - now) / 1000
        life = text('%d', life + (life / 16 + 8389) * part + fresh + 1)
        lives[last] = life
      end
      call('SET', keys[c], short .. text('%015d', state - 1600000000000000), 'PX', life)
    end
  end
end
return { now, '' }
