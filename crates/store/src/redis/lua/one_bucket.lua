-- The usual requests: nothing but buckets in whole microseconds, all required, all of one tenant's bundle, all taken from.
-- The same steps as `step.lua`'s first, without the tables that the others need: those cost more than deciding. A state that is
-- just as these limits write it is matched as a whole, which also finds whatever no script writes; all others, damage included,
-- are left to the general steps in `buckets.lua`. Here: one request of one bucket that is alone in its bundle.
--
-- ARGV[1]: time (double; -1 for the server's own), how many lists of limits follow (uint8), then each of them, and last of each
-- request its bundle and its list (uint8, both from 1). Requests of the same limits and costs share a list, which is:
--   how many buckets      uint8
--   pattern               of the state as these limits write it, with its instants as captures (zero-terminated)
--   form                  for `string.format`, of the same (zero-terminated)
--   of each bucket        doubles: cost, capacity, what is added to its TAT to give the instant (1 if the state says how far
--                         ahead it may be, as limits of the same counter differ in it: such a state is the next instant; -1.6e15
--                         in the short form of `scale.lua`; else 0), and how far ahead it may be, at least its capacity
-- Answers like `charge.lua`.
--
-- A key with buckets lives until the end of the span of 2^23 microseconds (8.4 s) in which the latest of their TATs lies, and
-- longer by chance, so that the keys of a span do not all expire at once. A charge within that span leaves the expiry as it is:
-- to set it costs as much as the rest of a write. All scripts that write buckets keep to it.
local decode, match, text, call = struct.unpack, string.match, string.format, redis.call
local ask, keys = ARGV[1], KEYS
local now, lists, n, pattern, form, cost, capacity, shift, at = decode('<dBBssddd', ask)
local fresh = 0
if now < 0 then
  local time = call('TIME')
  now = time[1] * 1000000 + time[2]
else
  fresh = 600000
end
-- Milliseconds that a key lives for each microsecond until the end of its span, and in addition.
local part = now % 1000 / 1000
local grow, spare = (1 + part / 16) / 1000, 8389 * part + fresh + 1

-- `is_alone`: the call has but one request.
local value, is_alone
if not keys[2] then
  value = call('GET', keys[1])
  is_alone = at + 32 * n - 23 == #ask
  if n == 1 and is_alone then
    local tat = now
    if value then
      tat = #value == (shift < 0 and 20 or #form + 14) and match(value, pattern)
      tat = tat and tat - shift
    end
    if tat and tat >= 1e15 and now >= -shift then
      local next, most = (tat > now and tat or now) + cost, now + capacity
      if next > most then
        if tat <= most or tat <= now + decode('<d', ask, at) then
          return { value, now, '0' }
        end
      elseif next < 2600000000000000 then
        local into = next % 8388608
        if value and into >= next - tat then
          -- In the same span as before.
          if shift < 0 then
            call('INCRBY', keys[1], text('%d', tat - next))
          else
            call('SET', keys[1], text(form, next + shift), 'KEEPTTL')
          end
        else
          local life = text('%d', (next - into + 8388608 - now) * grow + spare)
          call('SET', keys[1], text(form, next + shift), 'PX', life)
        end
        return { value, now, '1' }
      end
    end
  end
end

