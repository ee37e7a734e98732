-- Charges that have already happened, and permits that are given back: one after another, none turned away.
local answers = ''
while at <= #ask do
  local op, verb, _, c, a, b, d, e, f, extra, ago = charge()
  if op < 0 then
    return { now }
  end
  local state = states[c]
  if ago then
    state = assume(ago, state, op, b, d, e, f, extra, c)
    if verb == 2 then
      know(ago, op, b, d, e, f, extra, c)
    end
  end
  local _, next = step(op, verb, state, a, b, d, e, f, extra)
  if next then
    put(c, next)
  end
end
