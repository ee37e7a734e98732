-- The usual requests: nothing but buckets in whole microseconds, all required, all of one tenant's bundle, all taken from.
-- The same steps as `step.lua`'s first, without the tables that the others need: those cost more than deciding. Here: one
-- request of one bucket that is alone in its bundle, in the short form of `scale.lua`. Nothing is simpler or more usual.
--
-- ARGV[1]: time (double; -1 for the server's own), then a request after another: its bundle (uint16), how many buckets
-- (uint8), and of each its name as it stands in the bundle (";601:", zero-terminated), the first five characters of its
-- short form (zero-terminated, empty for none), cost, capacity and time of a unit (doubles). A bucket may be ahead by twice
-- its capacity; where 128 is added to how many there are, each says by how much, and its reach: log2 of that where limits of
-- the same counter differ in it, else 0 (two more doubles). Answers like `charge.lua`.
local decode, sub, number, text, find = struct.unpack, string.sub, tonumber, string.format, string.find
local ask = ARGV[1]
local now, b, n, name, short, cost, capacity, unit, at = decode('<dHBssddd', ask)
local fresh = 0
if now < 0 then
  local time = redis.call('TIME')
  now = time[1] * 1000000 + time[2]
else
  fresh = 600000
end

local value
if not KEYS[2] then
  value = redis.call('GET', KEYS[1])
  local furthest = capacity + capacity
  if n == 129 then
    local _
    furthest, _, at = decode('<dd', ask, at)
  end
  if at > #ask and short ~= '' and (not value or #value == 20 and sub(value, 1, 5) == short and not find(value, '%D', 6)) then
    local tat = value and number(sub(value, 6)) + 1600000000000000 or now
    local next = (tat > now and tat or now) + cost
    if tat <= now + furthest and now >= 1600000000000000 and next < 2600000000000000 then
      if next > now + capacity then
        return { value, now, '0' }
      end
      local life = (next - now) / 1000
      life = life + (life / 16 + 100) * (now % 1000) / 1000 + fresh
      redis.call('SET', KEYS[1], text('%s%015d', short, next - 1600000000000000), 'PX', life - life % 1 + 1)
      return { value, now, '1' }
    end
  end
end

