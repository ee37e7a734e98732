-- Counters of envoyproxy/ratelimit: plain numbers, one key each.
-- ARGV[1]: the node's time in microseconds; ARGV[2]: the number of requests; then for each charge its key's index, the
-- units to add (negative: to give back, down to zero), and the seconds after which the key expires.
-- Replies with what the keys held before, the time, and that every request was applied: such limits deny by the count.
local reply = {}
for at, key in ipairs(KEYS) do
  reply[at] = redis.call('GET', key) or ''
end
for at = 3, #ARGV, 3 do
  local key, units = KEYS[tonumber(ARGV[at])], tonumber(ARGV[at + 1])
  if units < 0 then
    local held = tonumber(redis.call('GET', key) or '0') or 0
    units = -math.min(held, -units)
  end
  redis.call('INCRBY', key, string.format('%.0f', units))
  redis.call('EXPIRE', key, ARGV[at + 2])
end
reply[#KEYS + 1] = tonumber(ARGV[1])
reply[#KEYS + 2] = string.rep('1', tonumber(ARGV[2]))
return reply
