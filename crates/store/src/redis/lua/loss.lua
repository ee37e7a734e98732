-- What a counter is taken for whose state this server may have lost, so long `ago`: if nothing is known that outlived the
-- loss, as used up at that moment. It recovers from there as its limit does. `data_loss.rs` assumes the same.
local function used_up(op, b, c, d, e, extra)
  local _, state = step(op, 3, false, b, b, (op == 2 or op == 12) and d or c, d, e, op == 10 and '0' or extra)
  return state
end

-- A counter that was reset after the loss is known: beside its state, which may be as good as none, its bundle has a
-- window with its name and a tilde that begins at the reset, for as long as the loss matters.
local function assume(ago, state, op, b, c, d, e, extra, which)
  local lost = now - ago
  local reset = entries[owner[which]][names[which] .. '~']
  if reset then
    local at = type(reset) == 'table' and reset[3] or number(reset:match('^w%d+,(%d+)'))
    if at and at > lost then
      return state
    end
  end
  if (op == 5 or op == 6) and lost < extra[1] then
    -- Two windows ago or more: it no longer matters.
    return state
  end
  local present = now
  now = lost
  local since = op > 10 and interval_end(extra) or lost
  if state and ends(state) > since then
    now = present
    return state
  end
  local assumed = used_up(op, b, c, d, e, extra)
  now = present
  return assumed or state
end

-- Writes that a counter was reset after the loss.
local function know(ago, op, b, c, d, e, extra, which)
  local present = now
  now = now - ago
  local assumed = used_up(op, b, c, d, e, extra)
  now = present
  if assumed and ends(assumed) > now then
    entries[owner[which]][names[which] .. '~'] = { 'w', ends(assumed), now, 0 }
    changed[owner[which]] = true
  end
end

