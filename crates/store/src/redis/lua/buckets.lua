-- The usual requests: nothing but buckets in whole microseconds, all required, all of one tenant's bundle, all taken from.
-- The same steps as `step.lua`'s first, without the tables that the others need: those cost more than deciding.
--
-- ARGV[1]: time (double; -1 for the server's own), then a request after another: its bundle (uint16), how many buckets
-- (uint8), and of each its name as it stands in the bundle (";601:", zero-terminated), cost and capacity (doubles). A bucket
-- may be ahead by twice its capacity; where 128 is added to how many there are, each says by how much (another double).
-- Answers like `charge.lua`.
local decode, sub, number, text = struct.unpack, string.sub, tonumber, string.format
local ask = ARGV[1]
local now, b, n, name, cost, capacity = decode('<dHBsdd', ask)
local fresh = 0
if now < 0 then
  local time = redis.call('TIME')
  now = time[1] * 1000000 + time[2]
else
  fresh = 600000
end

local value
if not KEYS[2] then
  value = redis.call('GET', KEYS[1])
  if (#ask == 33 or n == 129 and #ask == 41) and (not value or #value == 19 and sub(value, 17) == sub(name, 2, 4)) then
    -- One request of one bucket that is alone in its bundle, by a name of three digits. Nothing is simpler or more usual.
    local tat = now
    if value then
      tat = number(sub(value, 1, 16))
    end
    -- What is no instant is reported below.
    if tat and tat >= 1e15 and tat <= now + (n == 1 and capacity + capacity or decode('<d', ask, 34)) then
      local next = (tat > now and tat or now) + cost
      if next > now + capacity then
        return { value, now, '0' }
      end
      local life = (next - now) / 1000
      life = life + (life / 16 + 100) * (now % 1000) / 1000 + fresh
      redis.call('SET', KEYS[1], text('%d%s', next, sub(name, 2, 4)), 'PX', life - life % 1 + 1)
      return { value, now, '1' }
    end
  end
end

local find, byte, rep = string.find, string.byte, string.rep
local kept = { value }
if KEYS[2] then
  kept = redis.call('MGET', unpack(KEYS))
  for b = 1, #KEYS do
    if not kept[b] then
      -- MGET says nothing of a key of another type, which a write would replace; GET fails on it.
      redis.call('GET', KEYS[b])
    end
  end
end
-- As in `read.lua`.
local function damaged(b, why)
  error('key ' .. b .. ' holds no counters: ' .. why)
end
local function instant_of(text, b)
  local tat = number(text)
  if not tat or tat < 1e15 or tat >= 9e15 then
    damaged(b, 'an instant out of range')
  end
  return tat
end
local at = 9
local answers, values, ends = '', {}, {}
while at <= #ask do
  b, n, at = decode('<HB', ask, at)
  local each, form = 3, n == 4 and '<sddsddsddsdd' or n == 1 and '<sdd' or nil
  if n > 128 then
    n, each = n - 128, 4
  end
  local of = { decode(form or '<' .. rep(each == 3 and 'sdd' or 'sddd', n), ask, at) }
  at = of[each * n + 1]
  value = values[b] or kept[b] or ''
  local alone = nil
  if kept[b] == '' then
    damaged(b, 'an empty text')
  end
  if value ~= '' and byte(value) ~= 59 then
    -- A whole number: one bucket alone.
    if #value ~= 19 then
      damaged(b, 'not the text of a bundle')
    end
    instant_of(sub(value, 1, 16), b)
    name = ';' .. sub(value, 17) .. ':'
    if n == 1 and name == of[1] then
      alone, value = number(sub(value, 1, 16)), ''
    else
      value = name .. 'b' .. sub(value, 1, 16)
    end
  end
  local refused, mended, others_far, known, latest = false, false, false, 0, now
  -- Made at its size: a table that grows costs more than what it holds.
  local after = { of[1], 0, of[1], 0, of[1], 0, of[1], 0 }
  for i = 1, n do
    local j = each * (i - 1)
    name, cost, capacity = of[j + 1], of[j + 2], of[j + 3]
    local furthest = each == 4 and of[j + 4] or capacity + capacity
    local tat, bound = alone or 0, furthest
    local first, last = find(value, name, 1, true)
    if first then
      if byte(value, last + 1) == 98 then
        tat, last = instant_of(sub(value, last + 2, last + 17), b), last + 17
      else
        -- Of another rate or algorithm.
        local stop = (find(value, ';', last, true) or #value + 1) - 1
        tat = 0
        if byte(value, last + 1) == 102 then
          -- One that may be further ahead says so, as log2.
          local instant, reach = value:match('^(%d+),%d+,?(%d*)', last + 2)
          if not instant then
            damaged(b, 'a field that is no count')
          end
          tat = number(instant) - 1
          if reach ~= '' and 2 ^ reach > bound then
            bound = 2 ^ reach
          end
        elseif not find(value, '^[klpsw]%d', last + 1) then
          damaged(b, 'an unknown kind')
        end
        last = stop
      end
      known = known + last - first + 1
    end
    if tat > now + bound then
      tat, mended = now + furthest, true
    elseif tat > now + furthest then
      others_far = true
    end
    local next = (tat > now and tat or now) + cost
    if next > now + capacity then
      refused = true
    end
    if next > latest then
      latest = next
    end
    after[2 * i - 1], after[2 * i], of[j + 3] = name, next, tat
  end
  answers = answers .. (refused and '0' or '1')
  -- What another has counted further ahead than these may be is not rewritten, not even to mend the rest.
  if not refused or mended and not others_far then
    local others = ''
    if refused then
      latest = now
      for i = 1, n do
        local tat = of[each * i - each + 3]
        after[2 * i] = tat
        latest = tat > latest and tat or latest
      end
    end
    if known ~= #value then
      local own = {}
      for i = 1, n do
        own[of[each * i - each + 1]] = true
      end
      local read = 0
      for name, body, instant in value:gmatch('(;[^:;]+:)([bfklpsw](%d+)[^;]*)') do
        instant = number(instant)
        if instant >= 9e15 or instant < 1e15 and byte(body) == 98 then
          damaged(b, 'an instant out of range')
        end
        read = read + #name + #body
        if instant > now and not own[name] then
          others = others .. name .. body
          latest = instant > latest and instant or latest
        end
      end
      if read ~= #value then
        damaged(b, 'not the text of a bundle')
      end
    end
    if n == 1 and others == '' and #of[1] == 5 then
      values[b] = text('%d%s', after[2], sub(of[1], 2, 4))
    else
      local form = n == 4 and '%sb%d%sb%d%sb%d%sb%d' or rep('%sb%d', n)
      values[b] = text(form, unpack(after, 1, 2 * n)) .. others
    end
    ends[b] = latest
  end
end
for b, latest in pairs(ends) do
  local life = (latest - now) / 1000
  life = life + (life / 16 + 100) * (now % 1000) / 1000 + fresh
  redis.call('SET', KEYS[b], values[b], 'PX', life - life % 1 + 1)
end
kept[#KEYS + 1] = now
kept[#KEYS + 2] = answers
return kept
