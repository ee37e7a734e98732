-- One request of two to four buckets, in locals: tables cost more than deciding. See `one_bucket.lua`.
if n > 1 and n < 5 and is_alone and value and #value == #form + 14 * n then
  local one, two, three, four = match(value, pattern)
  if one then
    local _, cost2, most2, shift2, cost3, most3, shift3, cost4, most4, shift4
    local numbers = n == 4 and '<dddddddddddd' or n == 3 and '<dddddddd' or '<dddd'
    _, cost2, most2, shift2, _, cost3, most3, shift3, _, cost4, most4, shift4 = decode(numbers, ask, at)
    if n < 4 then
      -- Those that are missing are the first once more, which changes nothing.
      four, cost4, most4, shift4 = one, cost, capacity, shift
      if n < 3 then
        three, cost3, most3, shift3 = one, cost, capacity, shift
      end
    end
    local most = now + capacity
    most2, most3, most4 = now + most2, now + most3, now + most4
    one, two, three, four = one - shift, two - shift2, three - shift3, four - shift4
    if one >= 1e15 and two >= 1e15 and three >= 1e15 and four >= 1e15
      and one <= most and two <= most2 and three <= most3 and four <= most4 then
      local before = one > two and one or two
      before = three > before and three or before
      before = four > before and four or before
      one = (one > now and one or now) + cost
      two = (two > now and two or now) + cost2
      three = (three > now and three or now) + cost3
      four = (four > now and four or now) + cost4
      if one > most or two > most2 or three > most3 or four > most4 then
        return { value, now, '0' }
      end
      local latest = one > two and one or two
      latest = three > latest and three or latest
      latest = four > latest and four or latest
      local after = text(form, one + shift, two + shift2, three + shift3, four + shift4)
      local into = latest % 8388608
      if into >= latest - before then
        -- In the same span as before.
        call('SET', keys[1], after, 'KEEPTTL')
      else
        call('SET', keys[1], after, 'PX', text('%d', (latest - into + 8388608 - now) * grow + spare))
      end
      return { value, now, '1' }
    end
  end
end

