-- The algorithms whose state is a list: strict windows, logs and permits (of which verb 4 frees all that a holder has).
local function step_wide(op, verb, state, a, b, c, d, e, extra)
  local fields = state and type(state) == 'table' and state or nil

  if op == 8 then
    -- Slots: a the cost, b the limit, c a slot's width, d the phase, e the number of slots in a period.
    if fields and fields[1] ~= 'k' then
      fields = nil
    end
    local slot, present, used = fields and fields[3] or 0, floor((now + d) / c), 0
    local moved_by = present > slot and present - slot or 0
    local next = { 'k', 0, present > slot and present or slot }
    for age = 0, e do
      local from = age - moved_by
      local n = fields and from >= 0 and from <= e and fields[4 + from] or 0
      next[4 + age] = n
      used = used + n
    end
    local ahead = next[3] > present + 1
    if ahead then
      next[3] = present + 1
    end
    next[2] = (next[3] + e + 1) * c - d
    local fits, moved = true, ahead
    if verb == 2 then
      local left = a
      for age = 0, e do
        local back = left < next[4 + age] and left or next[4 + age]
        next[4 + age] = next[4 + age] - back
        left = left - back
      end
      moved = true
    elseif verb == 3 then
      local free = b + b > used and b + b - used or 0
      next[4] = next[4] + (a < free and a or free)
      moved = true
    elseif verb == 1 then
      fits = used + a <= b
      if fits then
        next[4] = next[4] + a
        moved = true
      end
    end
    return fits, moved and next or nil, ahead
  end

  if op == 9 then
    -- A log: a the cost, b the limit, c the period, d until when a refund takes from it (0 for now).
    local next, used, future = { 'l', 0 }, 0, 0
    if fields and fields[1] == 'l' then
      for i = 3, #fields, 2 do
        local taken, n = fields[i], fields[i + 1]
        if taken > now then
          future = future + n
        elseif taken + c > now then
          next[#next + 1] = taken
          next[#next + 1] = n
          used = used + n
        end
      end
    end
    local function add(n)
      if n > 0 then
        used = used + n
        if #next > 2 and next[#next - 1] == now then
          next[#next] = next[#next] + n
        else
          next[#next + 1] = now
          next[#next + 1] = n
        end
      end
    end
    add(future)
    local ahead = future > 0
    local fits, moved = true, ahead
    if verb == 2 then
      local left, rest = a, { 'l', 0 }
      for i = #next - 1, 3, -2 do
        if d == 0 or next[i] <= d then
          local back = left < next[i + 1] and left or next[i + 1]
          next[i + 1] = next[i + 1] - back
          left = left - back
        end
      end
      for i = 3, #next, 2 do
        if next[i + 1] > 0 then
          rest[#rest + 1] = next[i]
          rest[#rest + 1] = next[i + 1]
        end
      end
      next, moved = rest, true
    elseif verb == 3 then
      local free = b + b > used and b + b - used or 0
      add(a < free and a or free)
      moved = true
    elseif verb == 1 then
      fits = used + a <= b
      if fits then
        add(a)
        moved = true
      end
    end
    next[2] = #next > 2 and next[#next - 1] + c or 0
    return fits, moved and next or nil, ahead
  end

  -- Permits: a the cost, b the limit, c the longest that one is held, `extra` the holder ("0" is anonymous).
  local next, used, ahead, own = { 'p', 0 }, 0, false, nil
  if fields and fields[1] == 'p' then
    next.set = fields.set
    for i = 3, #fields, 3 do
      local holder, n, deadline = fields[i], fields[i + 1], fields[i + 2]
      if deadline > now then
        if deadline > now + c then
          deadline, ahead = now + c, true
        end
        if not own and holder == extra and extra ~= '0' then
          own = #next + 1
        end
        next[#next + 1] = holder
        next[#next + 1] = n
        next[#next + 1] = deadline
        used = used + n
      end
    end
  end
  local fits, moved = true, ahead
  if verb == 4 then
    verb, a = 2, extra == '0' and 0 or 1e15
  end
  if verb == 2 then
    local left, rest = a, { 'p', 0, set = next.set }
    for i = #next - 2, 3, -3 do
      if next[i] == extra then
        local back = left < next[i + 1] and left or next[i + 1]
        next[i + 1] = next[i + 1] - back
        left = left - back
      end
    end
    for i = 3, #next, 3 do
      if next[i + 1] > 0 then
        rest[#rest + 1] = next[i]
        rest[#rest + 1] = next[i + 1]
        rest[#rest + 1] = next[i + 2]
      end
    end
    next, moved = rest, true
  elseif verb == 1 or verb == 3 and a > 0 then
    local mine = own and next[own + 1] or 0
    fits = used - mine + a <= b or a <= mine
    if fits then
      own = own or #next + 1
      next[own], next[own + 1], next[own + 2] = extra, a, now + c
      moved = true
    elseif next.set and verb == 1 and a <= b then
      -- Which of the others ends first, as many units from the first on as are too many; those in this list may end before it.
      local set, excess = next.set, used - mine + a - b
      set.denied[#set.denied + 1] = { excess - (used - set.units), excess }
    end
    fits = fits or verb == 3
  end
  for i = 5, #next, 3 do
    next[2] = next[i] > next[2] and next[i] or next[2]
  end
  return fits, moved and next or nil, ahead
end
