-- The usual charges: windows and buckets that are alone in their bundles, in the short forms of `scale.lua`, required or
-- independent, all taken from. The same steps as in `step.lua`, without the tables and functions that the others need: those
-- cost more than deciding. If anything is in another form, the general steps below decide; nothing has been written then.
--
-- The c-th counter is in the c-th bundle. Of a window the short form is its code and how the number of the window is written
-- ("21%05d"), of a bucket its first five characters.
if is_short == 1 and now < 4000000000000000 then
  local sub, find = string.sub, string.find
  local place, answers, understood = at, '', true
  -- Made at their usual size: a table that grows costs more than what it holds. A state is a window's count or a bucket's TAT,
  -- false while it has not been read; `was` is what it was read as, -1 for a window that begins.
  local shorts, states, was = { '', '', '', '' }, { false, false, false, false }, { 0, 0, 0, 0 }
  -- Of each length of windows: the text before the count and its length, what the count stays below, and the end.
  local windows = {}
  for c = 1, counters do
    local _
    _, _, shorts[c], place = decode('<Hss', ask, place)
  end
  while understood and place <= #ask do
    local n, _
    n, _, place = decode('<HB', ask, place)
    local refused, taken = false, nil
    for _ = 1, n do
      local op, how, c, a, b, d, e, f
      op, _, how, c, a, b, d, e, f, place = decode('<BBBHddddd', ask, place)
      local state, short, next = states[c], shorts[c], nil
      if op == 1 then
        -- A bucket: `e` how far ahead it may be.
        e, f, place = decode('<dd', ask, place)
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
          states[c], was[c] = state, state
        end
        next = (state > now and state or now) + a
        if state > now + e or now < 1600000000000000 or next >= 2600000000000000 then
          understood = false
          break
        elseif next > now + b then
          next, refused = nil, refused or how == 0
        end
      else
        local window = windows[short]
        if not window then
          local start = now - now % d
          local head = text(short, start / d)
          window = { head, #head, 10 ^ (18 - #head) - 4096, start + d }
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
          states[c] = state
        end
        next = state + a
        if next > b then
          refused = refused or how == 0
          if op == 4 then
            next = next < f and next or f
            if how == 0 and n > 1 then
              -- What a refused request counts of its charges is for the general steps.
              understood = false
              break
            end
          end
          next = op == 4 and next > state and next or nil
        end
        if next and next >= window[3] then
          understood = false
          break
        end
      end
      if next then
        if how == 0 and n > 1 then
          taken = taken or {}
          taken[#taken + 1] = c
          taken[#taken + 1] = state
        end
        states[c] = next
      end
    end
    if refused and taken then
      for i = #taken, 1, -2 do
        states[taken[i - 1]] = taken[i]
      end
    end
    answers = answers .. (refused and '0' or '1')
  end
  if understood then
    local call, part = redis.call, now % 1000 / 1000
    for c = 1, counters do
      local state, before, window = states[c], was[c], windows[shorts[c]]
      if window and before >= 0 then
        -- Its window goes on, and so does its expiry.
        if state > before then
          call('INCRBY', KEYS[c], state - before == 1 and '1' or text('%d', state - before))
        end
      elseif window then
        if state > 0 then
          local value = window[1] .. text('%0' .. 18 - window[2] .. 'd', state)
          local life = (window[4] - now) / 1000
          call('SET', KEYS[c], value, 'PX', text('%d', life + (life / 16 + 100) * part + fresh + 1))
        end
      elseif state ~= before then
        local into = state % 8388608
        if into >= state - before then
          -- In the same span as before: see `one_bucket.lua`.
          call('INCRBY', KEYS[c], text('%d', before - state))
        else
          local value = text('%s%015d', shorts[c], state - 1600000000000000)
          local life = (state - into + 8388608 - now) / 1000
          call('SET', KEYS[c], value, 'PX', text('%d', life + (life / 16 + 8389) * part + fresh + 1))
        end
      end
    end
    kept[#KEYS + 1] = now
    kept[#KEYS + 2] = answers
    return kept
  end
end

