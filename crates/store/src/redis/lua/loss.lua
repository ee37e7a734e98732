-- What a counter is taken for whose state this server may have lost, so long `ago`: if nothing is known that outlived the
-- loss, as used up at that moment. It recovers from there as its limit does. `data_loss.rs` assumes the same.
local function assume(ago, state, op, b, c, d, e, extra)
  local lost = now - ago
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
  local _, used_up = step(op, 3, false, b, b, (op == 2 or op == 12) and d or c, d, e, op == 10 and '0' or extra)
  now = present
  return used_up or state
end

