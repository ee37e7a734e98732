-- What every script begins with: the ask, the time, and the bundles as they are kept.
--
-- KEYS      the bundles; ARGV[1] the ask (`script_args.rs` writes it):
--             time        double   microseconds, or -1 for the server's own
--             short       uint8    1 if `short.lua` may decide it
--             counters    uint16   then for each: its bundle (uint16, from 1), its name, and its short form as far as that
--                                  never changes (both zero-terminated; the latter empty for none)
--             then what the script itself reads, from `at` on
local decode, floor, number, text = struct.unpack, math.floor, tonumber, string.format
local ask = ARGV[1]
local now, is_short, counters, at = decode('<dBH', ask)
local fresh = 0
if now < 0 then
  local time = redis.call('TIME')
  now = time[1] * 1000000 + time[2]
else
  -- A time that is told stands still while the server's goes on: such keys must outlive their states.
  fresh = 600000
end

local kept
if KEYS[2] then
  kept = redis.call('MGET', unpack(KEYS))
  for b = 1, #KEYS do
    if not kept[b] then
      -- MGET says nothing of a key of another type, which a write would replace; GET fails on it.
      redis.call('GET', KEYS[b])
    end
  end
else
  kept = { redis.call('GET', KEYS[1]) }
end

