-- One charge of one counter, as tollgate_core's `Limit::step` and `Limit::debit` do it.
--
-- Every number is a whole one below 2^53, so nothing is rounded. `verb`: 0 looks, 1 takes, 2 gives back, 3 debits.
-- Returns whether it fits, the new state (nil where it stays), and whether a clock that went back had left the state
-- ahead, which is mended also where nothing is taken. Moving a window on is no change worth a write.

-- Whether p / q <= r / s, by Euclid: the products would not fit a double.
local function at_most(p, q, r, s)
  while true do
    local f, g = floor(p / q), floor(r / s)
    if f ~= g then
      return f < g
    end
    p, r = p - f * q, r - g * s
    if p == 0 then
      return true
    elseif r == 0 then
      return false
    end
    p, q, r, s = s, r, q, p
  end
end

-- How far ahead of now a bucket may be, the log2 that its state says of it (0 for nothing), and how far ahead this state
-- may be: another limit that may be further ahead has said so in it.
local function reaches(state, furthest)
  local own, bound = 0, nil
  if furthest < 0 then
    furthest = -furthest
    local _, log2 = math.frexp(furthest)
    own = log2
  end
  local reach = state and type(state) == 'table' and state[1] == 'f' and state[4] or 0
  bound = reach ~= 0 and reach ~= own and 2 ^ reach or furthest
  return furthest, own, bound > furthest and bound or furthest, reach
end

-- The state of a bucket that is full at m + f / k.
local function bucket(m, f, furthest, own, reach, k, unit)
  if m > now + furthest and reach > own then
    own = reach
  end
  return { 'f', m + 1, f, own, k, unit }
end

-- A bucket whose state another scale wrote, as `other_scale.rs` steps it: the units stay. Returns nil if nothing is owed.
local function other_scale(verb, state, a, b, c, d, k, extra)
  local m, f, reach, k1, one = state[2] - 1, state[3], state[4], state[5], state[6]
  local furthest, own, unit = extra[1], 0, extra[2]
  if furthest < 0 then
    furthest = -furthest
    local _, log2 = math.frexp(furthest)
    own = log2
  end
  if f >= k1 then
    f = k1 - 1
  end
  local bound = reach ~= 0 and 2 ^ reach > furthest and 2 ^ reach or furthest
  local ahead = m > now + bound or m == now + bound and f > 0
  local mended = nil
  if ahead then
    m, f = now + bound, 0
    mended = { 'f', m + 1, 0, reach, k1, one }
  elseif m < now or m == now and f == 0 then
    return nil
  end
  m = m - now
  if verb == 0 then
    return true, mended, ahead
  elseif verb == 2 then
    local back, part = m, f
    if a < furthest or a == furthest and c == 0 then
      back, part = convert(a, c, k, unit, k1, one, false)
    end
    m, f = m - back, f - part
    if f < 0 then
      m, f = m - 1, f + k1
    end
    if m < 0 then
      m, f = 0, 0
    end
    return true, { 'f', now + m + 1, f, reach, k1, one }, ahead
  end
  local owed, part = convert(m, f, k1, one, k, unit, true)
  m, f = owed + a, part + c
  if f >= k then
    m, f = m + 1, f - k
  end
  if verb == 1 then
    if m > b or m == b and f > d then
      return false, mended, ahead
    end
    return true, { 'f', now + m + 1, f, own, k, unit }, false
  end
  local most, rest = b + b, d + d
  if rest >= k then
    most, rest = most + 1, rest - k
  end
  if m > most or m == most and f > rest then
    m, f = most, rest
  end
  if m < owed or m == owed and f <= part then
    return true, nil, false
  end
  return true, { 'f', now + m + 1, f, own, k, unit }, false
end

-- The end of the refill interval that contains now: `extra` ends with its length and the key's phase.
local function interval_end(extra)
  local moment = now + extra[4]
  return moment - moment % extra[3] + extra[3]
end

local function step(op, verb, state, a, b, c, d, e, extra)
  if (op == 1 or op == 2) and state and type(state) == 'table' then
    if state[1] ~= 'f' then
      state = false
    elseif state[5] ~= 0 and (state[5] ~= e or state[6] ~= extra[2]) then
      local fits, next, ahead = other_scale(verb, state, a, b, c, d, e, extra)
      if fits ~= nil then
        return fits, next, ahead
      end
      state = false
    end
  end

  if op == 1 then
    -- A bucket in whole microseconds: a the cost, b the capacity; `extra` how far ahead it may be, and the time of a unit.
    local tat = 0
    if state then
      tat = type(state) == 'number' and state or state[2] - 1
    end
    local furthest, own, bound, reach = reaches(state, extra[1])
    local ahead = tat > now + bound
    local next = tat
    if ahead then
      next = now + furthest
    end
    local base = next > now and next or now
    local fits = true
    if verb == 1 then
      fits = base + a <= now + b
      if fits then
        next, ahead = base + a, false
      end
    elseif verb == 2 then
      -- A refund that is longer than it may be ahead gives back all, also what a longer burst has counted.
      next = base > now + a and a <= furthest and base - a or now
    elseif verb == 3 then
      local most = base + a < now + b + b and base + a or now + b + b
      next = base > most and base or most
    end
    return fits, next ~= tat and bucket(next, 0, furthest, own, reach, 1, extra[2]) or nil, ahead
  end

  if op == 2 then
    -- A bucket in fractions of 1/e: a and c the cost, b and d the capacity; `extra` as above.
    local m, f = 0, 0
    if state then
      if type(state) == 'number' then
        m = state
      else
        m, f = state[2] - 1, state[3]
        if f >= e then
          f = e - 1
        end
      end
    end
    local furthest, own, bound, reach = reaches(state, extra[1])
    local function full_at(micros, fraction)
      return bucket(micros, fraction, furthest, own, reach, e, extra[2])
    end
    local ahead = m > now + bound or m == now + bound and f > 0
    if ahead then
      m, f = now + furthest, 0
    end
    local mended = ahead and full_at(m, 0) or nil
    if verb == 0 then
      return true, mended, ahead
    end
    if m < now then
      m, f = now, 0
    end
    if verb == 2 then
      if a > furthest or a == furthest and c > 0 or m < now + a or m == now + a and f <= c then
        return true, full_at(now, 0)
      end
      m, f = m - a, f - c
      if f < 0 then
        m, f = m - 1, f + e
      end
      return true, full_at(m, f)
    end
    local before, part = m, f
    m, f = m + a, f + c
    if f >= e then
      m, f = m + 1, f - e
    end
    if verb == 1 then
      if m > now + b or m == now + b and f > d then
        return false, mended, ahead
      end
    else
      local most, rest = now + b + b, d + d
      if rest >= e then
        most, rest = most + 1, rest - e
      end
      if m > most or m == most and f > rest then
        m, f = most, rest
      end
      if before > m or before == m and part > f then
        m, f = before, part
      end
    end
    return true, full_at(m, f)
  end

  if op >= 3 and op <= 6 then
    -- A count a window: a the cost, b the limit, c the period, d the key's phase, e the most that is counted.
    -- 4 and 6 count attempts; 5 and 6 take their bounds from the calendar (`extra`).
    local moment, start, stop, after = now + d, nil, nil, nil
    if op <= 4 then
      start = moment - moment % c
      stop = start + c
      after = stop + c
    elseif now < extra[2] then
      start, stop, after = extra[1], extra[2], extra[3]
    else
      start, stop, after = extra[2], extra[3], extra[4]
    end
    local from, used, ahead = 0, 0, false
    if state and type(state) == 'table' and state[1] == 'w' then
      from, used = state[3], state[4]
    end
    if from >= stop then
      ahead = from > stop
      start, stop = stop, after
    elseif from < start then
      used = 0
    end
    local attempts = op == 4 or op == 6
    local fits, moved = true, ahead
    if verb == 2 then
      used, moved = used > a and used - a or 0, true
    elseif verb == 3 then
      local most = used + a < e and used + a or e
      used, moved = used > most and used or most, true
    elseif used + a <= b then
      used, moved = used + a, moved or a > 0
    elseif verb == 1 or attempts then
      fits = false
      if attempts then
        local most = used + a < e and used + a or e
        used, moved = used > most and used or most, moved or a > 0
      end
    end
    return fits, moved and { 'w', stop - d, start, used } or nil, ahead
  end

  if op == 7 then
    -- Two counts, weighted: a the cost, b the limit, c the period, d the phase.
    local moment = now + d
    local start = moment - moment % c
    local from, last, used, gone, ahead = 0, 0, 0, moment - start, false
    if state and type(state) == 'table' and state[1] == 's' then
      from, last, used = state[3], state[4], state[5]
    end
    if from > start then
      ahead = from > start + c
      start, gone = ahead and start + c or from, 0
    elseif from < start then
      last, used = from + c == start and used or 0, 0
    end
    local fits, moved = true, ahead
    if verb == 2 then
      local back = a < used and a or used
      last = last > a - back and last - (a - back) or 0
      used, moved = used - back, true
    elseif verb == 3 then
      local most = used + a < b + b and used + a or b + b
      used, moved = used > most and used or most, true
    elseif verb == 1 then
      -- last * (c - gone) + (used + a) * c <= b * c
      local room = b - used - a
      fits = room >= 0 and (last <= room or at_most(last - room, last, gone, c))
      if fits then
        used, moved = used + a, true
      end
    end
    return fits, moved and { 's', start + c + c - d, start, last, used } or nil, ahead
  end

  if op > 10 then
    -- A bucket that is refilled at intervals: the same at the end of its interval; `extra` begins as above.
    local present = now
    now = interval_end(extra)
    local fits, next, ahead = step(op - 10, verb, state, a, b, c, d, e, extra)
    now = present
    return fits, next, ahead
  end

  if op == 0 then
    -- Holds nothing.
    return verb ~= 1
  end
  return step_wide(op, verb, state, a, b, c, d, e, extra)
end
