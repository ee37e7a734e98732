-- What every script begins with: the ask, the time, and the bundles as they are kept.
--
-- KEYS      the bundles; ARGV[1] the ask (`script_args.rs` writes it):
--             time        double   microseconds, or -1 for the server's own
--             counters    uint16   then for each: its bundle (uint16, from 1), its name (zero-terminated)
--             then what the script itself reads, from `at` on
--
-- A bundle is the text that docs/internals/redis-format.md describes. A counter's state is false (unused), a number (a bucket's
-- TAT in whole microseconds, of an unknown scale), or a table: its kind, the instant of its expiry, its fields. Of a bucket these
-- are the microsecond after its TAT, the fraction, the reach, and the scale (0 and 0 if that is unknown). States are never
-- changed in place.
local decode, floor, number, text = struct.unpack, math.floor, tonumber, string.format
local ask = ARGV[1]
local now, counters, at = decode('<dH', ask)
local fresh = 0
if now < 0 then
  local time = redis.call('TIME')
  now = time[1] * 1000000 + time[2]
else
  -- A time that is told stands still while the server's goes on: such keys must outlive their states.
  fresh = 600000
end

-- No script writes anything but bundles: somebody else did, and nothing may rest on it. The number tells which key it is.
local function damaged(b, why)
  error('key ' .. b .. ' holds no counters: ' .. why)
end

local kept
if KEYS[2] then
  kept = redis.call('MGET', unpack(KEYS))
  for b = 1, #KEYS do
    if not kept[b] then
      -- MGET says nothing of a key of another type, which a write would replace; GET fails on it.
      redis.call('GET', KEYS[b])
    end
  end
else
  kept = { redis.call('GET', KEYS[1]) }
end

-- Name to state, or to its text as long as nobody has asked for it.
local function split(value, b)
  local found = {}
  if value then
    local read = 0
    if value:byte() == 59 then
      -- The first field is an instant, of every kind.
      for name, kind, first, rest in value:gmatch(';([^:;]+):([bfklpsw])(%d+)([^;]*)') do
        read = read + #name + #first + #rest + 3
        local instant = number(first)
        if instant >= 9e15 or kind == 'b' and (instant < 1e15 or rest ~= '' and not rest:find('^,%d+$')) then
          damaged(b, 'an instant out of range')
        end
        found[name] = kind == 'b' and rest == '' and instant or kind .. first .. rest
      end
    elseif #value == 19 then
      local tat = number(value:sub(1, 16))
      if tat and tat >= 1e15 and tat < 9e15 then
        found[value:sub(17)], read = tat, 19
      end
    else
      local name, tat, unit = expand(value)
      if name then
        found[name], read = { 'f', tat + 1, 0, 0, 1, unit }, 20
      end
    end
    if read == 0 or read ~= #value then
      damaged(b, 'not the text of a bundle')
    end
  end
  return found
end

local function parse(body, b)
  local kind = body:sub(1, 1)
  local state, holders = { kind }, kind == 'p'
  for field in body:sub(2):gmatch('[^,]+') do
    local n = #state
    -- Holders of permits are names: every third field after the expiry.
    local read = (holders and n > 1 and n % 3 == 2) and field or number(field)
    -- Not a number included.
    if type(read) ~= 'string' and not (read and read >= 0 and read <= 9223372036854775807) then
      damaged(b, 'a field that is no count')
    end
    state[n + 1] = read
  end
  if kind == 'b' then
    state = { 'f', state[2] + 1, 0, 0, 1, state[3] }
  elseif kind == 'f' then
    state[3], state[4] = state[3] or 0, state[4] or 0
  end
  if state[1] == 'f' then
    local k, unit = state[5] or 0, state[6] or 0
    local known = k > 0 and k <= 1099511627776 and unit > 0 and unit <= 1125899906842624
    state[5], state[6] = known and k or 0, known and unit or 0
  end
  return state
end

-- The microsecond from which a state is as good as none.
local function ends(state)
  if type(state) ~= 'table' then
    return state
  end
  return state[1] == 'f' and state[3] == 0 and state[2] - 1 or state[2]
end

local entries, owner, names, states, changed = {}, {}, {}, {}, {}
for c = 1, counters do
  local b, name
  b, name, at = decode('<Hs', ask, at)
  local found = entries[b]
  if not found then
    found = split(kept[b], b)
    entries[b] = found
  end
  local state = found[name] or false
  if state and type(state) == 'string' then
    state = parse(state, b)
  end
  owner[c], names[c], states[c] = b, name, state
end

-- Puts a counter's new state (false: none) where it is written at the end.
local function put(c, state)
  local b = owner[c]
  states[c], entries[b][names[c]], changed[b] = state, state or nil, true
end
