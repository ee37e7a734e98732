-- Requests, one after another. Of each: how many charges (uint16), whether its alternatives bind here (uint8; not where
-- others of them live in another slot), then the charges, independent ones first.
-- Answers what was kept in each bundle, the time, and a digit a request: 1 admitted, 0 refused.
local answers = ''
while at <= #ask do
  local n, binds
  n, binds, at = decode('<HB', ask, at)
  local first = at
  local refused, mend, alternatives, fitting, tried = false, false, 0, 0, nil
  for _ = 1, n do
    local op, verb, how, c, a, b, d, e, f, extra, ago = charge()
    if op < 0 then
      return { now }
    end
    local state = states[c]
    if tried and tried[c] ~= nil then
      state = tried[c]
    end
    if ago then
      state = assume(ago, state, op, b, d, e, f, extra)
    end
    local fits, next, ahead = step(op, verb, state, a, b, d, e, f, extra)
    if verb == 0 then
      -- Who looks changes nothing.
      next, ahead = nil, false
    end
    if how == 2 then
      if next then
        put(c, next)
      end
    else
      mend = mend or ahead
      if how == 1 then
        alternatives = alternatives + 1
        fitting = fitting + (fits and 1 or 0)
      elseif not fits then
        refused = true
      end
      if next then
        tried = tried or {}
        tried[c] = next
      end
    end
  end
  if refused or binds == 1 and alternatives > 0 and fitting == 0 then
    answers = answers .. '0'
    if mend then
      at = first
      for _ = 1, n do
        local op, _, how, c, _, b, d, e, f, extra = charge()
        if how ~= 2 then
          local _, next = step(op, 0, states[c], 0, b, d, e, f, extra)
          if next then
            put(c, next)
          end
        end
      end
    end
  else
    answers = answers .. '1'
    if tried then
      for c, next in pairs(tried) do
        put(c, next)
      end
    end
  end
end
for c, set in pairs(sets) do
  if set.exists then
    with_sets().describe(c, set)
  end
end
