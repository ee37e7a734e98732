-- Gives back units that were taken ahead and not used: no more than time has not given back already, and once only.
-- KEYS[2] is the mark that it has been done. After the counters the ask has the time of the taking, when a bucket was to be
-- full after it, then for a bucket the units, and the time of a unit as interval / k (doubles; zero for other limits), then
-- one charge. Where somebody has taken after it, a bucket gives nothing back: that would give back the other's slots.
local answers = ''
local taken, full_at, units, interval, k
taken, full_at, units, interval, k, at = decode('<ddddd', ask, at)
local op, _, _, c, a, b, d, e, f, extra = charge()
if op < 0 then
  return { now }
end

if not kept[2] then
  local present, gives = now, false
  if interval > 0 then
    local passed = (present > taken and present - taken or 0) * k
    local begun = floor(passed / interval)
    if begun * interval > passed then
      begun = begun - 1
    elseif begun * interval < passed then
      begun = begun + 1
    end
    local time = (units - begun) * interval
    local full = states[c] or 0
    if type(full) == 'table' then
      -- The first microsecond at which the bucket is full.
      full = full[3] > 0 and full[2] or full[2] - 1
    end
    if interval < k or (full > now and full or now) ~= full_at then
      time = 0
    end
    -- Past 2^53 numbers are not exact, and it is so long ago that time has given all back.
    if passed < 9007199254740992 and time > 0 and time < 9007199254740992 then
      gives, a = true, floor(time / k)
      d = time - a * k
    end
  elseif op < 5 or op > 6 or taken >= extra[1] then
    local _, here = step(op, 1, false, 1, b, d, e, f, extra)
    now = taken
    local _, there = step(op, 1, false, 1, b, d, e, f, extra)
    now = present
    gives = here and there and here[3] == there[3]
  end
  if gives and states[c] then
    local _, next = step(op, 2, states[c], a, b, d, e, f, extra)
    put(c, next)
  end
  redis.call('SET', KEYS[2], '1', 'PX', 60000)
end
