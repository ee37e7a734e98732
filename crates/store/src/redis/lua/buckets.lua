-- Every other request of nothing but buckets: see `one_bucket.lua`.
local byte, rep = string.byte, string.rep
-- Tables are made at their usual size: one that grows costs more than what it holds.
local kept = { value, 0, '' }
if keys[2] then
  kept = call('MGET', unpack(keys))
  for b = 1, #keys do
    if not kept[b] then
      -- MGET says nothing of a key of another type, which a write would replace; GET fails on it.
      call('GET', keys[b])
    end
  end
end

-- The lists as they are decoded: how many buckets, the pattern, the form, then four numbers for each.
local limits = { false, false }
at = 10
for l = 1, lists do
  n = byte(ask, at)
  local kinds = n == 1 and '<Bssdddd' or n == 4 and '<Bssdddddddddddddddd' or '<Bss' .. rep('dddd', n)
  limits[l] = { decode(kinds, ask, at) }
  at = limits[l][4 * n + 4]
end
local requests = { byte(ask, at, #ask) }

-- Of each bundle: its new value, the latest of its TATs, and the latest before, 0 if its expiry is to be set.
local values, ends, begins = { false, false }, { false, false }, { false, false }
local answers, which, list, size = '', 0, nil, 0
local convert, expand, expand_window
for r = 1, #requests, 2 do
  local b = requests[r]
  if requests[r + 1] ~= which then
    which = requests[r + 1]
    list = limits[which]
    n, pattern, form, cost, capacity, shift = list[1], list[2], list[3], list[4], list[5], list[6]
    size = shift < 0 and 20 or #form + 14 * n
  end
  value = values[b] or kept[b]
  local decided, refused, before, latest, after = false, false, 0, now, nil
  if value and #value ~= size then
    -- Another state than these limits write.
  elseif n == 1 then
    local tat = now
    if value then
      tat = match(value, pattern)
      tat = tat and tat - shift
    end
    local most = now + capacity
    if tat and tat >= 1e15 and tat <= most and now >= -shift then
      latest = (tat > now and tat or now) + cost
      refused = latest > most
      decided = refused or latest < 2600000000000000
      if not refused and decided then
        before, after = value and tat or 0, text(form, latest + shift)
      end
    end
  else
    local tats
    if value then
      tats = { match(value, pattern) }
      decided = tats[1]
    else
      tats, decided = { 0, 0, 0, 0 }, true
    end
    if decided then
      for i = 1, n do
        local j = 4 * i
        local most, plus = now + list[j + 1], list[j + 2]
        local tat = value and tats[i] - plus or now
        if tat < 1e15 or tat > most then
          decided, refused = false, false
          break
        end
        before = value and tat > before and tat or before
        tat = (tat > now and tat or now) + list[j]
        refused = refused or tat > most
        latest = tat > latest and tat or latest
        tats[i] = tat + plus
      end
      if decided and not refused then
        after = text(form, unpack(tats, 1, n))
      end
    end
  end

  if not decided then
    -- The general steps: a state of another rate, algorithm or form, beside other counters, ahead, or damaged.
    if not convert then
      convert, expand, expand_window = scale()
    end
    local find, sub, number = string.find, string.sub, tonumber
    -- As in `read.lua`.
    local function damaged(why)
      error('key ' .. b .. ' holds no counters: ' .. why)
    end
    local function instant_of(text)
      local tat = number(text)
      if not tat or tat < 1e15 or tat >= 9e15 then
        damaged('an instant out of range')
      end
      return tat
    end
    -- What a state has before each instant and after it, and the first five characters of the short form.
    local heads, tails, short, long = {}, {}, '', form
    if shift < 0 then
      short = sub(form, 1, 5)
      local name, _, unit = expand(short .. '000000000000000')
      heads[1], tails[1] = ';' .. name .. ':b', text(',%d', unit)
      long = heads[1] .. '%d' .. tails[1]
    else
      for head, tail in form:gmatch('(;[^:]+:[bf])%%d([^;]*)') do
        heads[#heads + 1], tails[#tails + 1] = head, tail
      end
    end
    value, before, latest = value or '', 0, now
    local alone = 0
    if kept[b] == '' then
      damaged('an empty text')
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
        value = text(';%s:b%d', sub(value, 17), instant_of(sub(value, 1, 16)))
      else
        damaged('not the text of a bundle')
      end
    end
    -- `mended`: by the number of a bucket its text, where a clock which went back had left it ahead.
    local mended, known, nexts = nil, 0, {}
    for i = 1, n do
      local head, tail, furthest = heads[i], tails[i], list[4 * i + 3]
      local plus = short == '' and list[4 * i + 2] or 0
      local tat, bound = alone, furthest
      local first, last = find(value, head, 1, true)
      local stop = first and last + 16 + #tail
      if first and sub(value, last + 17, stop) == tail and (stop == #value or byte(value, stop + 1) == 59) then
        -- As this limit writes it.
        tat = instant_of(sub(value, last + 1, last + 16)) - plus
        known = known + stop - first + 1
      elseif value ~= '' then
        local name = sub(head, 1, -2)
        first, last = find(value, name, 1, true)
        if first then
          stop = (find(value, ';', last, true) or #value + 1) - 1
          local kind, k, one, f, reach = byte(value, last + 1), 0, 0, 0, 0
          local unit, own = number(tail:match('%d+$')), plus > 0 and number(tail:match('^,0,(%d+)')) or 0
          if kind == 98 then
            tat = instant_of(sub(value, last + 2, last + 17))
            if stop > last + 17 then
              k, one = 1, number(value:match('^,(%d+)$', last + 18) or value:match('^,(%d+);', last + 18))
              if not one then
                damaged('a field that is no count')
              end
            end
          elseif kind == 102 then
            -- Of another rate: with a fraction, or of one that may be further ahead and says so, as log2.
            local instant, part, far, parts, time = value:match('^(%d+),(%d+),?(%d*),?(%d*),?(%d*)', last + 2)
            if not instant then
              damaged('a field that is no count')
            end
            tat, f, reach = number(instant) - 1, number(part), number(far) or 0
            k, one = number(parts) or 0, number(time) or 0
          elseif not find(value, '^[klpsw]%d', last + 1) then
            damaged('an unknown kind')
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
        mended[i] = text('%s%d%s', head, tat + plus, tail)
      end
      local next = (tat > now and tat or now) + list[4 * i]
      refused = refused or next > now + list[4 * i + 1]
      latest = next > latest and next or latest
      nexts[i] = next + plus
    end
    -- A state that a clock which went back had left ahead is mended also where nothing is taken; the others stay.
    if not refused or mended then
      local others = ''
      if refused then
        latest = now
        for i = 1, n do
          local first, last = find(value, sub(heads[i], 1, -2), 1, true)
          mended[i] = mended[i] or first and sub(value, first, (find(value, ';', last, true) or #value + 1) - 1) or ''
          local instant = number(mended[i]:match(':%a(%d+)')) or 0
          latest = instant > latest and instant or latest
        end
      end
      if known ~= #value then
        local own = {}
        for i = 1, n do
          own[sub(heads[i], 1, -2)] = true
        end
        local read = 0
        for name, body, instant in value:gmatch('(;[^:;]+:)([bfklpsw](%d+)[^;]*)') do
          instant = number(instant)
          if instant >= 9e15 or instant < 1e15 and byte(body) == 98 then
            damaged('an instant out of range')
          end
          read = read + #name + #body
          if instant > now and not own[name] then
            others = others .. name .. body
            latest = instant > latest and instant or latest
          end
        end
        if read ~= #value then
          damaged('not the text of a bundle')
        end
      end
      if refused then
        after = table.concat(mended, '', 1, n) .. others
      elseif others == '' and short ~= '' and latest >= 1600000000000000 and latest < 2600000000000000 then
        after = text('%s%015d', short, latest - 1600000000000000)
      else
        after = text(long, unpack(nexts, 1, n)) .. others
      end
    end
  end

  answers = answers .. (refused and '0' or '1')
  if after then
    values[b], ends[b], begins[b] = after, latest, begins[b] or before
  end
end

for b = 1, #keys do
  local latest = ends[b]
  if latest then
    local into = latest % 8388608
    if into >= latest - begins[b] then
      -- In the same span as before.
      call('SET', keys[b], values[b], 'KEEPTTL')
    else
      call('SET', keys[b], values[b], 'PX', text('%d', (latest - into + 8388608 - now) * grow + spare))
    end
  end
end
kept[#keys + 1] = now
kept[#keys + 2] = answers
return kept
