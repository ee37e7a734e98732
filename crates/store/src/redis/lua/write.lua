-- What every script ends with: each bundle that changed is written once, without what has expired, and lives as long
-- as the latest of its states does, and a little longer, by chance, so that a window's keys do not all expire at once. Buckets
-- live to the end of their span, as `one_bucket.lua` has it.
local function join(name, state)
  local kind = state[1]
  if kind == 'f' then
    local tat = state[2] - 1
    if state[3] == 0 and state[4] == 0 and state[5] == 1 and tat >= 1e15 and tat < 9e15 then
      return text(';%s:b%d,%d', name, tat, state[6])
    elseif state[5] == 0 then
      return text(state[4] > 0 and ';%s:f%d,%d,%d' or ';%s:f%d,%d', name, state[2], state[3], state[4])
    end
    return text(';%s:f%d,%d,%d,%d,%d', name, state[2], state[3], state[4], state[5], state[6])
  elseif kind == 'w' then
    return text(';%s:w%d,%d,%d', name, state[2], state[3], state[4])
  elseif kind == 's' then
    return text(';%s:s%d,%d,%d,%d', name, state[2], state[3], state[4], state[5])
  end
  local fields, last = {}, #state
  while kind == 'k' and last > 4 and state[last] == 0 do
    last = last - 1
  end
  for i = 2, last do
    fields[i - 1] = type(state[i]) == 'number' and text('%d', state[i]) or state[i]
  end
  return ';' .. name .. ':' .. kind .. table.concat(fields, ',')
end

for b in pairs(changed) do
  local found = entries[b]
  local texts, n, latest, chance, only = {}, 0, now, 100, nil
  for name, state in pairs(found) do
    local kind = type(state)
    local expires = kind == 'string' and number(state:match('%d+')) or ends(state)
    if expires > now then
      n, only = n + 1, name
      local letter = kind == 'string' and state:sub(1, 1) or kind == 'table' and state[1] or 'b'
      if letter == 'b' or letter == 'f' then
        expires, chance = expires - expires % 8388608 + 8388608, 8389
      end
      if expires > latest then
        latest = expires
      end
      if kind == 'number' then
        -- Sixteen digits, or it says so: until the year 2255 it is.
        local usual = state >= 1e15 and state < 9e15
        texts[n] = usual and text(';%s:b%d', name, state) or text(';%s:f%d,0', name, state + 1)
      elseif kind == 'table' then
        texts[n] = join(name, state)
      else
        texts[n] = ';' .. name .. ':' .. state
      end
    end
  end
  if n == 0 then
    redis.call('DEL', KEYS[b])
  else
    local value
    local state = n == 1 and found[only]
    local code = n == 1 and (codes[only] or only:match('^%d%d$'))
    if type(state) == 'string' and (state:byte() == 98 or code and state:byte() == 119) then
      state = parse(state, b)
    end
    if code and type(state) == 'table' and state[1] == 'w' then
      value = shrink_window(code, state)
    elseif type(state) == 'table' and state[1] == 'f' and state[3] == 0 and state[4] == 0 and state[5] == 1 then
      value = shrink(only, state[2] - 1, state[6])
    end
    value = value or table.concat(texts)
    local life = floor((latest - now) / 1000) + 1
    redis.call('SET', KEYS[b], value, 'PX', life + fresh + floor((life / 16 + chance) * (now % 1000) / 1000))
  end
end
