-- The usual debits: windows and buckets that are alone in their bundles, in the short forms of `scale.lua`. The same steps as
-- in `step.lua`, without the tables and functions that the others need; `short.lua` does so for charges. If anything is in
-- another form, the general steps below debit; nothing has been written then.
if is_short == 1 and now < 4000000000000000 then
  local sub, find, call = string.sub, string.find, redis.call
  local place, understood = at, true
  -- A state is a window's count or a bucket's TAT, false while it has not been read; `was` is what it was read as, -1 for a
  -- window that begins.
  local shorts, states, was = {}, {}, {}
  -- Of each length of windows: the text before the count and its length, what the count stays below, and the end.
  local windows = {}
  for c = 1, counters do
    local _
    _, _, shorts[c], place = decode('<Hss', ask, place)
    states[c] = false
  end
  while place <= #ask do
    local op, c, a, b, d, f, far, _
    op, _, _, c, a, b, d, _, f, place = decode('<BBBHddddd', ask, place)
    local state, short, next = states[c], shorts[c], nil
    if op == 1 then
      far, _, place = decode('<dd', ask, place)
      if not state then
        local value = kept[c]
        if not value then
          state = 0
        elseif #value == 20 and sub(value, 1, 5) == short and not find(value, '%D', 6) then
          state = number(sub(value, 6)) + 1600000000000000
        else
          understood = false
          break
        end
        was[c] = state
      end
      local base, most = state > now and state or now, now + b + b
      next = base + a
      if next > most then
        next = base > most and base or most
      end
      if state > now + far or now < 1600000000000000 or next >= 2600000000000000 then
        understood = false
        break
      end
    else
      local window = windows[short]
      if not window then
        local start = now - now % d
        local head = text(short, start / d)
        window = { head, #head, 10 ^ (18 - #head), start + d }
        windows[short] = window
      end
      if not state then
        local value, digits = kept[c], window[2]
        if not value then
          state, was[c] = 0, -1
        elseif #value ~= 18 or find(value, '%D') then
          understood = false
          break
        elseif sub(value, 1, digits) == window[1] then
          state = number(sub(value, digits + 1))
          was[c] = state
        elseif sub(value, 1, 2) == sub(short, 1, 2) and number(sub(value, 3, digits)) < number(sub(window[1], 3)) then
          state, was[c] = 0, -1
        else
          -- Another counter's, or ahead: a clock went back.
          understood = false
          break
        end
      end
      next = state + a
      if next > f then
        next = state > f and state or f
      end
      if next >= window[3] then
        understood = false
        break
      end
    end
    states[c] = next
  end
  if understood then
    local part = now % 1000 / 1000
    for c = 1, counters do
      local state, before, window = states[c], was[c], windows[shorts[c]]
      if window and before and before >= 0 then
        -- Its window goes on, and so does its expiry.
        if state > before then
          call('INCRBY', KEYS[c], state - before == 1 and '1' or text('%d', state - before))
        end
      elseif state and state > 0 and state ~= before then
        local life = ((window and window[4] or state) - now) / 1000
        life = life + (life / 16 + 100) * part + fresh
        local value
        if window then
          value = window[1] .. text('%0' .. 18 - window[2] .. 'd', state)
        else
          value = text('%s%015d', shorts[c], state - 1600000000000000)
        end
        call('SET', KEYS[c], value, 'PX', life - life % 1 + 1)
      end
    end
    kept[#KEYS + 1] = now
    kept[#KEYS + 2] = ''
    return kept
  end
end

