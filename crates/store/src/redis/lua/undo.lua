-- Undoes what a request took here, because another slot refused it. After the counters the ask has the time of the
-- taking (double), then the request as `charge.lua` had it, then for each charge the name of its mark (zero-terminated,
-- empty for none) that leases of its bucket may be out; ARGV[2 + b] is what bundle b held before ('' for nothing).
--
-- A counter that nobody has touched since is put back as it was. Else no more is given back than time has not given
-- back by itself: a refund never lets more through than the limit. Where leases may be out a bucket gives nothing back:
-- its time would move back into slots that others hold.
local answers = ''
local present, taken, n, _ = now, nil, nil, nil
taken, n, _, at = decode('<dHB', ask, at)

local before, after, took = {}, {}, {}
for c = 1, counters do
  local value = ARGV[2 + owner[c]]
  before[c] = state_of(split(value ~= '' and value, owner[c]), names[c], owner[c])
end
now = taken
for i = 1, n do
  local op, verb, how, c, a, b, d, e, f, extra, ago = charge()
  local state = after[c]
  if state == nil then
    state = before[c]
  end
  if ago then
    state = assume(ago, state, op, b, d, e, f, extra, c)
  end
  local fits, next = step(op, verb, state, a, b, d, e, f, extra)
  if how == 2 then
    if next then
      before[c] = next
    end
  else
    if next then
      after[c] = next
    end
    if fits and verb == 1 then
      took[#took + 1] = { op, c, a, b, d, e, f, extra, i }
    end
  end
end
now = present
local marks = {}
for i = 1, n do
  marks[i], at = decode('<s', ask, at)
end

-- Whether leases of a counter may be out: what they leave on its mark is 2^24.
local function leased(c, name)
  local mark = name ~= '' and entries[owner[c]][name]
  if type(mark) == 'string' then
    mark = parse(mark, owner[c])
  end
  return mark and mark[2] > now and (mark[4] >= 16777216 or mark[5] >= 16777216)
end

-- What has no time left is not kept.
local function same(one, other)
  if not one and other then
    return ends(other) <= taken
  end
  if type(one) ~= 'table' or type(other) ~= 'table' then
    return one == other
  end
  for i = 1, math.max(#one, #other) do
    if (one[i] or 0) ~= (other[i] or 0) then
      return false
    end
  end
  return true
end

-- The place of a holder's permit in a list; nil if it has none.
local function place_of(list, holder)
  for i = 3, #(list or {}), 3 do
    if list[i] == holder then
      return i
    end
  end
end

-- Puts the permit of a holder back as it was, if nobody has renewed or released it since.
local function restore_permit(c, holder)
  local state, was = states[c], before[c]
  local at, made, had = place_of(state, holder), place_of(after[c], holder), place_of(was, holder)
  if not at or not made or state[at + 1] ~= after[c][made + 1] or state[at + 2] ~= after[c][made + 2] then
    return false
  end
  local list = { 'p', 0 }
  for i = 3, #state, 3 do
    local from, place = state, i
    if i == at then
      from, place = was, had
    end
    if place and from[place + 2] > now then
      append(list, from[place], from[place + 1], from[place + 2])
    end
  end
  put(c, with_expiry(list))
  return true
end

local restored = {}
for c, state in pairs(after) do
  -- Others hold permits of the same counter all the time: each is restored by itself.
  if state[1] ~= 'p' and same(states[c], state) then
    put(c, before[c])
    restored[c] = true
  end
end
for i = #took, 1, -1 do
  local op, c, a, b, d, e, f, extra, which = unpack(took[i], 1, 9)
  local state, was = states[c], after[c]
  if not restored[c] and state then
    local back = a
    if op == 1 or op == 2 then
      back = leased(c, marks[which]) and 0 or a - (present - taken)
    elseif op > 10 then
      now = taken
      local refilled = interval_end(extra)
      now = present
      back = a - (interval_end(extra) - refilled)
    elseif op == 9 then
      local next = { 'l', state[2] }
      for j = 3, #state, 2 do
        local left = state[j] == taken and state[j + 1] - a or state[j + 1]
        if left > 0 then
          next[#next + 1] = state[j]
          next[#next + 1] = left
        end
      end
      put(c, next)
      back = 0
    elseif op == 10 then
      local id = c .. ' ' .. extra
      if extra ~= '0' and (restored[id] or restore_permit(c, extra)) then
        restored[id], back = true, 0
      elseif extra ~= '0' and place_of(before[c], extra) then
        back = 0
      end
    elseif type(state) ~= 'table' or state[1] ~= was[1] or state[3] ~= was[3] then
      -- Another window: what was taken has left by itself, or leaves when it does.
      back = 0
    end
    if back > 0 then
      local _, next = step(op, 2, state, back, b, d, e, f, extra)
      if next then
        put(c, next)
      end
    end
  end
end
