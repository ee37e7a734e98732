-- One charge of the ask:
--   op, verb, how (0 required, 1 alternative, 2 independent; 4 more where the state may have been lost), counter (uint16,
--   from 1), five doubles, what `op` adds: how far ahead a bucket may be and how many of its units of time are a unit of cost
--   (doubles), then for one that is refilled at intervals their length and the key's phase (doubles); four borders of windows
--   for a calendar (doubles); the holder for permits (zero-terminated); and last, where the state may have been lost, how long
--   ago (double).
local function charge()
  local op, verb, how, c, a, b, d, e, f, extra, ago
  op, verb, how, c, a, b, d, e, f, at = decode('<BBBHddddd', ask, at)
  if op == 1 or op == 2 then
    extra = {}
    extra[1], extra[2], at = decode('<dd', ask, at)
  elseif op == 5 or op == 6 then
    extra = {}
    extra[1], extra[2], extra[3], extra[4], at = decode('<dddd', ask, at)
    if now < extra[1] or now >= extra[3] then
      -- The asker's clock is more than a window off: it asks again with the bounds of this time.
      op = -1
    end
  elseif op == 10 then
    extra, at = decode('<s', ask, at)
  elseif op > 10 then
    extra = {}
    extra[1], extra[2], extra[3], extra[4], at = decode('<dddd', ask, at)
  end
  if how > 3 then
    how = how - 4
    ago, at = decode('<d', ask, at)
  end
  return op, verb, how, c, a, b, d, e, f, extra, ago
end

