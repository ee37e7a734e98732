-- One request of four buckets, in locals: tables cost more than deciding. See `one_bucket.lua`.
if n == 4 and is_alone and value and #value == #form + 56 then
  local one, two, three, four = match(value, pattern)
  if one then
    local _, cost2, most2, shift2, cost3, most3, shift3, cost4, most4, shift4
    _, cost2, most2, shift2, _, cost3, most3, shift3, _, cost4, most4, shift4 = decode('<dddddddddddd', ask, at)
    local most = now + capacity
    most2, most3, most4 = now + most2, now + most3, now + most4
    one, two, three, four = one - shift, two - shift2, three - shift3, four - shift4
    if one >= 1e15 and two >= 1e15 and three >= 1e15 and four >= 1e15
      and one <= most and two <= most2 and three <= most3 and four <= most4 then
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
      call('SET', keys[1], after, 'PX', text('%d', (latest - now) * grow + spare))
      return { value, now, '1' }
    end
  end
end

