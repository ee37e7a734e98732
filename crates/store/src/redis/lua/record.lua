-- A record that nodes share. ARGV[1] is what it must be ('' for none), ARGV[2] what it becomes then ('' to read only, or
-- '-' alone in ARGV[3] to remove it), ARGV[3] for how many milliseconds.
-- Answers whether it was stored, what it was, and the time.
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
if ARGV[3] == '-' then
  redis.call('DEL', KEYS[1])
  return { 1, false, now }
end
local kept = redis.call('GET', KEYS[1])
local stored = 0
if ARGV[2] ~= '' and (kept or '') == ARGV[1] then
  redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])
  stored = 1
end
return { stored, kept, now }
