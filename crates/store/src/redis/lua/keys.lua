-- Which keys are bundles: all, or as many of the first as ARGV[2] says. After them come sorted sets (`permit_sets.lua`).
local all_keys, KEYS = KEYS, KEYS
if ARGV[2] then
  KEYS = { unpack(all_keys, 1, tonumber(ARGV[2])) }
end

