-- The usual requests: nothing but buckets in whole microseconds, all required, all of one tenant's bundle, all taken from.
-- The same steps as `step.lua`'s first, without the tables that the others need: those cost more than deciding. Here: one
-- request of one bucket that is alone in its bundle, in the short form of `scale.lua`. Nothing is simpler or more usual.
--
-- ARGV[1]: time (double; -1 for the server's own), then a request after another: its bundle (uint16), how many buckets
-- (uint8), and of each what its state has before the instant (";601:b") and after it (both zero-terminated), cost and
-- capacity (doubles); where there is but one, the first five characters of its short form (zero-terminated, empty for
-- none). A bucket may be ahead by twice its capacity; where 128 is added to how many there are, each says by how much
-- (another double, before the short form), negative if its state says so too, as limits of the same counter differ in it:
-- such a state is the next instant. Answers like `charge.lua`.
local decode, sub, number, text, find = struct.unpack, string.sub, tonumber, string.format, string.find
local ask = ARGV[1]
local now, b, n, head, tail, cost, capacity, short, at = decode('<dHBssdds', ask)
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
  local furthest, shift = capacity + capacity, 0
  if n == 129 then
    furthest, short, at = decode('<ds', ask, at - #short - 1)
    if furthest < 0 then
      furthest, shift = -furthest, 1
    end
  end
  if at > #ask and n % 128 == 1 then
    local tat, epoch = not value and now or nil, 0
    if short ~= '' then
      epoch = 1600000000000000
      if value and #value == 20 and sub(value, 1, 5) == short and not find(value, '%D', 6) then
        tat = number(sub(value, 6)) + epoch
      end
    elseif value and #value == #head + 16 + #tail and find(value, head, 1, true) == 1 and sub(value, #head + 17) == tail
      and find(value, '%D', #head + 1) == #head + 17 then
      tat = number(sub(value, #head + 1, #head + 16)) - shift
    end
    local next = tat and (tat > now and tat or now) + cost
    if tat and tat >= 1e15 and tat <= now + furthest and now >= epoch and next < 2600000000000000 then
      if next > now + capacity then
        return { value, now, '0' }
      end
      local life = (next - now) / 1000
      life = life + (life / 16 + 100) * (now % 1000) / 1000 + fresh
      local kept = epoch > 0 and text('%s%015d', short, next - epoch) or text('%s%d%s', head, next + shift, tail)
      redis.call('SET', KEYS[1], kept, 'PX', life - life % 1 + 1)
      return { value, now, '1' }
    end
  end
end

