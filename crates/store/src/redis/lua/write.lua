-- What every script ends with: each bundle that changed is written once, without what has expired, and lives as long
-- as the latest of its states does, and a little longer, by chance, so that a window's keys do not all expire at once.
local function join(name, state)
  local kind = state[1]
  if kind == 'b' then
    return text('%s:b%.0f.%.0f;', name, state[2], state[3])
  elseif kind == 'w' then
    return text('%s:w%.0f,%.0f,%.0f;', name, state[2], state[3], state[4])
  elseif kind == 's' then
    return text('%s:s%.0f,%.0f,%.0f,%.0f;', name, state[2], state[3], state[4], state[5])
  end
  local fields, last = {}, #state
  while kind == 'k' and last > 4 and state[last] == 0 do
    last = last - 1
  end
  for i = 2, last do
    fields[i - 1] = type(state[i]) == 'number' and text('%.0f', state[i]) or state[i]
  end
  return name .. ':' .. kind .. table.concat(fields, ',') .. ';'
end

for b in pairs(changed) do
  local found = entries[b]
  local value, latest, only = '', now, nil
  for name, state in pairs(found) do
    local expires, entry = state, nil
    if type(state) == 'string' then
      local instant, fraction = state:match('^%a(%d+)(%.?)')
      expires = number(instant) + #fraction
      entry = name .. ':' .. state .. ';'
    elseif type(state) == 'table' then
      expires = state[1] == 'b' and state[2] + 1 or state[2]
    end
    if expires > now then
      latest = expires > latest and expires or latest
      only = value == '' and name or nil
      value = value .. (entry or type(state) == 'table' and join(name, state) or text('%s:b%.0f;', name, state))
    end
  end
  if value == '' then
    redis.call('DEL', KEYS[b])
  else
    -- One bucket alone, by a name of three digits: a whole number, which costs the server no memory of its own.
    if only and #only == 3 and type(found[only]) == 'number' and found[only] >= 1e15 and found[only] < 9e15 then
      value = text('%.0f', found[only]) .. only
    end
    local life = floor((latest - now) / 1000) + 1
    redis.call('SET', KEYS[b], value, 'PX', life + fresh + floor((life / 16 + 100) * (now % 1000) / 1000))
  end
end
