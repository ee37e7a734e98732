-- The scale of a bucket's state: k, units of time in a microsecond, and how many of these are a unit of cost, of the limit
-- that wrote it. A limit with another scale counts the same units in its own time, as tollgate_core's `Scale` does it.

-- floor(x * y / d) and the rest, exactly: x and d are below 2^51, y below 2^53. Bit by bit, for want of longer numbers.
local function muldiv(x, y, d)
  local whole = math.floor(x / d)
  local part, bit, q, r = x - whole * d, 1, 0, 0
  whole = whole * y
  while bit * 2 <= y do
    bit = bit * 2
  end
  while bit >= 1 do
    q, r = q + q, r + r
    if y >= bit then
      y, r = y - bit, r + part
    end
    while r >= d do
      q, r = q + 1, r - d
    end
    bit = bit / 2
  end
  return whole + q, r
end

-- The time m + f / k1, where `one` parts of 1 / k1 are a unit of cost, as m + f / k2, where `two` of 1 / k2 are: rounded up,
-- and then no more than 2^51 microseconds, or down.
local function convert(m, f, k1, one, k2, two, up)
  -- Units, and the rest of one.
  local units, rest = muldiv(m, k1, one)
  rest = rest + f
  local more = math.floor(rest / one)
  units, rest = units + more, rest - more * one
  if units > 4398046511104 then
    units = 4398046511104
  end
  local part, left = muldiv(rest, two, one)
  if up and left > 0 then
    part = part + 1
  end
  local whole, over = muldiv(two, units, k2)
  part = part + over
  local carry = math.floor(part / k2)
  whole, part = whole + carry, part - carry * k2
  if up and whole >= 2251799813685248 then
    return 2251799813685248, 0
  end
  return whole, part
end

-- One bucket alone, of a usual period and count, is a whole number, which costs the server no memory of its own: a minus,
-- four digits for its name and count, fifteen for its TAT, in microseconds since 1.6e15. `compact.rs` has the same.
local usual = { '001', '010', '030', '601', '605', '610', '615', '630', '701', '712', '801', '807', '830', '890' }

-- The length of the period that a name of three digits stands for.
local function period_of(name)
  local n = tonumber(name)
  if n < 600 then
    return n * 1000000
  elseif n < 700 then
    return (n - 600) * 60000000
  elseif n < 800 then
    return (n - 700) * 3600000000
  end
  return (n - 800) * 86400000000
end

-- The name, the TAT and the time of a unit that such a number holds; nil if it is none.
local function expand(value)
  local code = #value == 20 and tonumber(value:match('^%-(%d%d%d%d)%d+$')) or 0
  local name = usual[math.floor((code - 1000) / 549) + 1]
  if code < 1000 or not name then
    return nil
  end
  local count = (code - 1000) % 549 + 1
  if count > 99 then
    local place = count - 100
    count = (place % 90 + 10) * 10 ^ (math.floor(place / 90) + 1)
  end
  local unit = period_of(name) / count
  if unit % 1 ~= 0 then
    return nil
  end
  return name, tonumber(value:sub(6)) + 1600000000000000, unit
end

-- The number for a bucket; nil if it has none.
local function shrink(name, tat, unit)
  if #name ~= 3 or tat < 1600000000000000 or tat >= 2600000000000000 then
    return nil
  end
  for i = 1, #usual do
    if usual[i] == name then
      local count, zeros = period_of(name) / unit, 0
      while count > 99 and count % 10 == 0 do
        count, zeros = count / 10, zeros + 1
      end
      if count % 1 ~= 0 or count < 1 or count > 99 or zeros > 5 then
        return nil
      end
      local place = zeros == 0 and count - 1 or 99 + (zeros - 1) * 90 + count - 10
      return string.format('-%d%015d', 1000 + (i - 1) * 549 + place, tat - 1600000000000000)
    end
  end
  return nil
end

-- One fixed window alone, of a usual length, is a whole number too: two digits for its length, as many for which window it is
-- since 1970 as all of them until 2096 need, and the count in the rest of 18. A charge adds to it without another expiry.
local lengths = {
  1, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 14400, 21600, 28800, 43200, 86400, 604800, 2592000,
  7776000, 31536000,
}

-- The seconds of a code, and the digits for which window it is.
local function window_of(code)
  local seconds = lengths[tonumber(code) - 9]
  return seconds, seconds and #string.format('%d', 4000000000 / seconds)
end

-- The code and the state that such a number holds; nil if it is none.
local function expand_window(value)
  if #value ~= 18 or value:find('%D') then
    return nil
  end
  local code = value:sub(1, 2)
  local seconds, digits = window_of(code)
  if not seconds then
    return nil
  end
  local start = tonumber(value:sub(3, 2 + digits)) * seconds * 1000000
  return code, { 'w', start + seconds * 1000000, start, tonumber(value:sub(3 + digits)) }
end

-- The number for a window; nil if it has none. The highest counts have none either: a number just before that of an empty window
-- would be mistaken for it by `short_debit.lua`, which sees only about which it is.
local function shrink_window(code, state)
  local seconds, digits = window_of(code)
  local index = seconds and state[3] / (seconds * 1000000)
  if not index or index % 1 ~= 0 or index >= 10 ^ digits or state[4] >= 10 ^ (16 - digits) - 4096 then
    return nil
  elseif state[2] ~= (index + 1) * seconds * 1000000 then
    -- A key whose windows are shifted.
    return nil
  end
  return string.format('%s%0' .. digits .. 'd%0' .. 16 - digits .. 'd', code, index, state[4])
end
