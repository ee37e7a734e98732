-- What every script ends with: each bundle that changed is written once, without what has expired, and lives as long
-- as the latest of its states does, and a little longer, by chance, so that a window's keys do not all expire at once.
local function join(name, state)
  local kind = state[1]
  if kind == 'f' then
    local reach = state[4] or 0
    return text(reach > 0 and ';%s:f%d,%d,%d' or ';%s:f%d,%d', name, state[2], state[3], reach)
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
  local texts, n, latest, only = {}, 0, now, nil
  for name, state in pairs(found) do
    local kind = type(state)
    local expires = state
    if kind == 'table' then
      expires = state[2]
    elseif kind == 'string' then
      expires = number(state:match('%d+'))
    end
    if expires > now then
      n, only = n + 1, name
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
    local state = n == 1 and #only == 3 and found[only]
    if type(state) == 'number' and state >= 1e15 and state < 9e15 then
      -- One bucket alone, by a name of three digits: a whole number, which costs the server no memory of its own.
      value = text('%d%s', state, only)
    else
      value = table.concat(texts)
    end
    local life = floor((latest - now) / 1000) + 1
    redis.call('SET', KEYS[b], value, 'PX', life + fresh + floor((life / 16 + 100) * (now % 1000) / 1000))
  end
end
