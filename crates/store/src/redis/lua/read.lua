-- What every script begins with: the ask, the time, and the bundles as they are kept.
--
-- KEYS      the bundles; ARGV[1] the ask (`script_args.rs` writes it):
--             time        double   microseconds, or -1 for the server's own
--             counters    uint16   then for each: its bundle (uint16, from 1), its name (zero-terminated)
--             then what the script itself reads, from `at` on
--
-- A bundle is the text that docs/internals/redis-format.md describes. A counter's state is false (unused), a number (a bucket's TAT in
-- whole microseconds), or a table: its kind, the instant of its expiry, its fields. States are never changed in place.
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

local kept
if KEYS[2] then
  kept = redis.call('MGET', unpack(KEYS))
else
  kept = { redis.call('GET', KEYS[1]) }
end

-- Name to state, or to its text as long as nobody has asked for it.
local function split(value)
  local found = {}
  if value then
    if value:byte() == 59 then
      for name, kind, fields in value:gmatch(';([^:]+):(%a)([^;]+)') do
        found[name] = kind == 'b' and number(fields) or kind .. fields
      end
    else
      found[value:sub(17)] = number(value:sub(1, 16))
    end
  end
  return found
end

local function parse(body)
  local kind = body:sub(1, 1)
  local state, holders = { kind }, kind == 'p'
  for field in body:sub(2):gmatch('[^,]+') do
    local n = #state
    -- Holders of permits are names: every third field after the expiry.
    local read = (holders and n > 1 and n % 3 == 2) and field or number(field)
    -- No script writes anything but whole numbers: somebody else did, and nothing may rest on it. Not a number included.
    if type(read) ~= 'string' and not (read and read >= 0 and read <= 9223372036854775807) then
      error('a counter has a field that is no count')
    end
    state[n + 1] = read
  end
  return state
end

local entries, owner, names, states, changed = {}, {}, {}, {}, {}
for c = 1, counters do
  local b, name
  b, name, at = decode('<Hs', ask, at)
  local found = entries[b]
  if not found then
    found = split(kept[b])
    entries[b] = found
  end
  local state = found[name] or false
  if state and type(state) == 'string' then
    state = parse(state)
  end
  owner[c], names[c], states[c] = b, name, state
end

-- Puts a counter's new state (false: none) where it is written at the end.
local function put(c, state)
  local b = owner[c]
  states[c], entries[b][names[c]], changed[b] = state, state or nil, true
end
