-- Requests, one after another. Of each: how many charges (uint16), whether its alternatives bind here (uint8; not where
-- others of them live in another slot), then the charges, independent ones first.
-- Of a refused request, windows that count attempts count what they refuse.
-- Answers what was kept in each bundle, the time, and a digit a request: 1 admitted, 0 refused.
local function counts_attempts(op)
  return op == 4 or op == 6
end
local answers = ''
while at <= #ask do
  local n, binds
  n, binds, at = decode('<HB', ask, at)
  local first = at
  local refused, mend, attempted, alternatives, fitting, tried = false, false, false, 0, 0, nil
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
      state = assume(ago, state, op, b, d, e, f, extra, c)
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
      attempted = attempted or not fits and counts_attempts(op)
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
    if mend or attempted then
      at = first
      for _ = 1, n do
        local op, verb, how, c, a, b, d, e, f, extra = charge()
        if how ~= 2 then
          local fits, next = true, nil
          if verb == 1 and counts_attempts(op) then
            fits, next = step(op, verb, states[c], a, b, d, e, f, extra)
          end
          if fits then
            _, next = step(op, 0, states[c], 0, b, d, e, f, extra)
          end
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
