-- The states of the counters that the ask names.
--
-- A bundle is the text that docs/internals/redis-format.md describes. A counter's state is false (unused), a number (a bucket's
-- TAT in whole microseconds, of an unknown scale), or a table: its kind, the instant of its expiry, its fields. Of a bucket these
-- are the microsecond after its TAT, the fraction, the reach, and the scale (0 and 0 if that is unknown). States are never
-- changed in place.

-- No script writes anything but bundles: somebody else did, and nothing may rest on it. The number tells which key it is.
local function damaged(b, why)
  error('key ' .. b .. ' holds no counters: ' .. why)
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
    elseif #value == 18 then
      local code, state = expand_window(value)
      if code then
        found[code], read = state, 18
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

-- The code that a window with this name has in its short form.
local codes = {}

-- The state with this name among those of bundle b. A window that was alone is known by its code until somebody who knows
-- its name has asked for it.
local function state_of(found, name, b)
  local state, code = found[name] or false, codes[name]
  if not state and code and found[code] then
    state, found[name], found[code] = found[code], found[code], nil
  end
  if state and type(state) == 'string' then
    state = parse(state, b)
  end
  return state
end

local entries, owner, names, states, changed, asked_sets = {}, {}, {}, {}, {}, {}
for c = 1, counters do
  local b, name, short
  b, name, short, at = decode('<Hss', ask, at)
  codes[name] = short:match('^%d%d')
  local found = entries[b]
  if not found then
    found = split(kept[b], b)
    entries[b] = found
  end
  owner[c], names[c], states[c] = b, name, state_of(found, name, b)
  if short:byte() == 112 then
    -- Permits have no short form; `permit_sets.lua` reads this.
    asked_sets[c] = short
  end
end

-- Puts a counter's new state (false: none) where it is written at the end.
local function put(c, state)
  local b = owner[c]
  states[c], entries[b][names[c]], changed[b] = state, state or nil, true
end
