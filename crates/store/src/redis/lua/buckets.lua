-- Every other request of nothing but buckets: see `one_bucket.lua`.
local byte, rep = string.byte, string.rep
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
at = 9
local answers, values, ends = '', {}, {}
while at <= #ask do
  b, n, at = decode('<HB', ask, at)
  local each, form = 4, n == 4 and '<ssddssddssddssdd' or n == 1 and '<ssdds' or nil
  if n > 128 then
    n, each = n - 128, 5
    form = n == 4 and '<ssdddssdddssdddssddd' or n == 1 and '<ssddds' or nil
  end
  local of = { decode(form or '<' .. rep(each == 4 and 'ssdd' or 'ssddd', n), ask, at) }
  short, at = '', of[each * n + 1]
  if n == 1 then
    short, at = at, of[each + 2]
  end
  value = values[b] or kept[b] or ''
  local alone = 0
  if kept[b] == '' then
    damaged(b, 'an empty text')
  end
  if #value == 20 and sub(value, 1, 5) == short and not find(value, '%D', 6) then
    alone, value = number(sub(value, 6)) + 1600000000000000, ''
  elseif value ~= '' and byte(value) ~= 59 then
    -- A whole number: one window or bucket alone, in the short form, or without a scale as former versions wrote it.
    local whose, tat, time = expand(value)
    local code, window = expand_window(value)
    if code then
      value = text(';%s:w%d,%d,%d', code, window[2], window[3], window[4])
    elseif whose then
      value = text(';%s:b%d,%d', whose, tat, time)
    elseif #value == 19 then
      value = text(';%s:b%d', sub(value, 17), instant_of(sub(value, 1, 16), b))
    else
      damaged(b, 'not the text of a bundle')
    end
  end
  -- `mended`: by the number of a bucket its text, where a clock which went back had left it ahead.
  local refused, mended, known, latest = false, nil, 0, now
  -- Made at its size: a table that grows costs more than what it holds.
  local after = { of[1], 0, of[1], of[1], 0, of[1], of[1], 0, of[1], of[1], 0, of[1] }
  for i = 1, n do
    local j = each * (i - 1)
    head, tail, cost, capacity = of[j + 1], of[j + 2], of[j + 3], of[j + 4]
    local furthest, shift = capacity + capacity, 0
    if each == 5 then
      furthest = of[j + 5]
      if furthest < 0 then
        furthest, shift = -furthest, 1
      end
    end
    local tat, bound = alone, furthest
    local first, last = find(value, head, 1, true)
    local stop = first and last + 16 + #tail
    if first and sub(value, last + 17, stop) == tail and (stop == #value or byte(value, stop + 1) == 59) then
      -- As this limit writes it.
      tat = number(sub(value, last + 1, last + 16))
      if not tat or tat < 1e15 or tat >= 9e15 then
        damaged(b, 'an instant out of range')
      end
      tat, known = tat - shift, known + stop - first + 1
    elseif value ~= '' then
      local name = sub(head, 1, -2)
      first, last = find(value, name, 1, true)
      if first then
        stop = (find(value, ';', last, true) or #value + 1) - 1
        local kind, k, one, f, reach = byte(value, last + 1), 0, 0, 0, 0
        local unit, own = number(tail:match('%d+$')), shift > 0 and number(tail:match('^,0,(%d+)')) or 0
        if kind == 98 then
          tat = instant_of(sub(value, last + 2, last + 17), b)
          if stop > last + 17 then
            k, one = 1, number(value:match('^,(%d+)$', last + 18) or value:match('^,(%d+);', last + 18))
            if not one then
              damaged(b, 'a field that is no count')
            end
          end
        elseif kind == 102 then
          -- Of another rate: with a fraction, or of one that may be further ahead and says so, as log2.
          local instant, part, far, parts, time = value:match('^(%d+),(%d+),?(%d*),?(%d*),?(%d*)', last + 2)
          if not instant then
            damaged(b, 'a field that is no count')
          end
          tat, f, reach = number(instant) - 1, number(part), number(far) or 0
          k, one = number(parts) or 0, number(time) or 0
        elseif not find(value, '^[klpsw]%d', last + 1) then
          damaged(b, 'an unknown kind')
        end
        known = known + stop - first + 1
        local scaled = k > 0 and one > 0 and k <= 1099511627776 and one <= 1125899906842624 and (k ~= 1 or one ~= unit)
        if reach > 0 and (scaled or reach ~= own) and 2 ^ reach > bound then
          bound = 2 ^ reach
        end
        if scaled then
          -- Of another scale: the units stay, as in `step.lua`.
          f = f < k and f or k - 1
          if tat > now + bound or tat == now + bound and f > 0 then
            tat, f, mended = now + bound, 0, mended or {}
            mended[i] = text('%sf%d,0,%d,%d,%d', name, tat + 1, reach, k, one)
          end
          tat = (tat > now or tat == now and f > 0) and now + convert(tat - now, f, k, one, 1, unit, true) or 0
          bound = tat
        end
      end
    end
    if tat > now + bound then
      tat, mended = now + furthest, mended or {}
      mended[i] = text('%s%d%s', head, tat + shift, tail)
    end
    local next = (tat > now and tat or now) + cost
    if next > now + capacity then
      refused = true
    end
    if next > latest then
      latest = next
    end
    after[3 * i - 2], after[3 * i - 1], after[3 * i] = head, next + shift, tail
  end
  answers = answers .. (refused and '0' or '1')
  -- A state that a clock which went back had left ahead is mended also where nothing is taken; the others stay.
  if not refused or mended then
    local others = ''
    if refused then
      latest = now
      for i = 1, n do
        local first, last = find(value, sub(of[each * i - each + 1], 1, -2), 1, true)
        mended[i] = mended[i] or first and sub(value, first, (find(value, ';', last, true) or #value + 1) - 1) or ''
        local instant = number(mended[i]:match(':%a(%d+)')) or 0
        latest = instant > latest and instant or latest
      end
    end
    if known ~= #value then
      local own = {}
      for i = 1, n do
        own[sub(of[each * i - each + 1], 1, -2)] = true
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
    if refused then
      values[b] = table.concat(mended, '', 1, n) .. others
    elseif others == '' and short ~= '' and latest >= 1600000000000000 and latest < 2600000000000000 then
      values[b] = text('%s%015d', short, latest - 1600000000000000)
    else
      local form = n == 4 and '%s%d%s%s%d%s%s%d%s%s%d%s' or n == 1 and '%s%d%s' or rep('%s%d%s', n)
      values[b] = text(form, unpack(after, 1, 3 * n)) .. others
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
