-- Permits of a counter beyond the first few, in a sorted set beside the bundle: a call costs what the permits cost that it
-- names, however many are held. docs/internals/redis-format.md has the format of the set.
--
-- The steps work on a short list of the same permits: those in the text, those of the holders that the ask names, and all
-- others as one, held by `others` until the last of them ends. Nothing in a decision depends on more; how long a denied request
-- has to wait does, so the reply has the permits around that time too (`describe`), and the node computes it.
local others = 'ffffffffffffffffffffffffffffffff'
-- Up to as many permits are in the text alone, where they cost less; also what former versions can read without loss.
local max_in_text = 16
local sets, queue = {}, {}

-- Adds a permit to a list.
local function append(list, holder, units, deadline)
  local n = #list
  list[n + 1], list[n + 2], list[n + 3] = holder, units, deadline
end

-- The list with the instant of its expiry.
local function with_expiry(list)
  list[2] = 0
  for i = 5, #list, 3 do
    list[2] = list[i] > list[2] and list[i] or list[2]
  end
  return list
end

-- What is done with sets. The functions are made when the first set is used: most calls use none.
local set_steps
local function with_sets()
  if set_steps then
    return set_steps
  end

  local function digits(n)
    return text('%d', n)
  end

  -- A member's name and its units. Anonymous permits are named by their deadline: equal ones are one.
  local function split_member(member, set)
    local name, units = member:match('^([%x:]+),?(%d*)$')
    if not name then
      damaged(set.index, 'a permit that no script wrote')
    end
    return name, units == '' and 1 or number(units)
  end

  -- The units and the deadline that a name has in the set; nil if it holds nothing now.
  local function find_member(set, name)
    local units, deadline = 1, number(redis.call('ZSCORE', set.key, name) or 0)
    if deadline < 0 then
      units = -deadline
      deadline = number(redis.call('ZSCORE', set.key, name .. text(',%d', units)) or 0)
    end
    if deadline > now then
      return units, deadline
    end
  end

  -- Whether a sorted set may be at this key; false if this user may not use any.
  local function may_use(set, answer)
    if type(answer) ~= 'table' or not answer.err then
      return true
    elseif answer.err:find('WRONGTYPE', 1, true) then
      damaged(set.index, 'another type')
    end
    return false
  end

  -- Reads what the ask has for a set: which key it is, how many units anonymous holders may give back, and the other holders.
  -- Notes which permits are in the text.
  local function read_ask(set)
    local index, refunds, ids = set.asked:match('^p(%d+),(%d+)(.*)')
    set.index, set.key, set.refunds = index, all_keys[number(index)], number(refunds)
    set.ids, set.text, set.held, set.extra = {}, {}, {}, 0
    for id in ids:gmatch('%x+') do
      set.ids[id] = true
    end
    local state = set.before or {}
    for i = 3, #state, 3 do
      set.text[state[i] == '0' and '0:' .. digits(state[i + 2]) or state[i]] = true
    end
    return ids
  end

  -- Replaces the state of counter c by the short list of its permits.
  local function open(c, set, marked, marked_until)
    local ids = read_ask(set)
    local state, list, key, wanted = set.before, { 'p', 0 }, set.key, set.refunds
    set.exists, set.units, set.latest, set.expired, set.denied = true, 0, 0, {}, {}
    for i = 3, #state, 3 do
      if state[i] ~= others then
        append(list, state[i], state[i + 1], state[i + 2])
      end
    end
    local extra = redis.pcall('ZSCORE', key, '#')
    if not may_use(set, extra) then
      error(extra.err)
    end
    set.extra = extra and -number(extra) or 0
    set.stored_extra = set.extra
    set.count = redis.call('ZCOUNT', key, '(' .. digits(now), '+inf')
    if set.extra > 0 then
      for _, member in ipairs(redis.call('ZRANGEBYSCORE', key, 0, digits(now))) do
        local name, units = split_member(member, set)
        if units > 1 then
          set.extra = set.extra - units + 1
          set.expired[#set.expired + 1] = name
        end
      end
    end

    local members, units_held = 0, 0
    local function hold(name, holder, units, deadline)
      set.held[name] = { units, deadline }
      members, units_held = members + 1, units_held + units
      -- A node of a former version does not see the set, and has renewed it in the text.
      if holder == '0' or not set.text[name] then
        append(list, holder, units, deadline)
      end
    end
    for id in ids:gmatch('%x+') do
      local units, deadline = find_member(set, id)
      if units and not set.held[id] then
        hold(id, id, units, deadline)
      end
    end
    local offset, some = 0, nil
    while wanted > 0 and (not some or #some == 200) do
      -- The anonymous permits taken last, from which refunds are taken.
      some = redis.call('ZREVRANGEBYSCORE', key, '+inf', '(' .. digits(now), 'WITHSCORES', 'LIMIT', offset, 100)
      for i = 1, #some, 2 do
        if wanted > 0 and some[i]:sub(1, 2) == '0:' then
          local name, units = split_member(some[i], set)
          hold(name, '0', units, number(some[i + 1]))
          wanted = wanted - units
        end
      end
      offset = offset + 100
    end

    set.units = set.count + set.extra - units_held
    if set.units > 0 then
      local last = redis.call('ZREVRANGE', key, 0, members, 'WITHSCORES')
      for i = #last - 1, 1, -2 do
        if not set.held[split_member(last[i], set)] then
          set.latest = number(last[i + 1])
        end
      end
      append(list, others, set.units, set.latest)
    elseif marked_until <= now then
      append(list, others, marked, marked_until)
    end
    if set.units < 0 or set.units > 0 and set.latest <= now then
      damaged(set.index, 'permits that no script wrote')
    end
    if set.refunds > 0 then
      -- In the order in which they were taken: nobody takes a permit that ends before another.
      local order, sorted = {}, { 'p', 0 }
      for i = 3, #list, 3 do
        order[#order + 1] = i
      end
      table.sort(order, function(one, other)
        return list[one + 2] < list[other + 2]
      end)
      for _, i in ipairs(order) do
        append(sorted, list[i], list[i + 1], list[i + 2])
      end
      list = sorted
    end
    list.set, set.list = set, list
    states[c] = with_expiry(list)
  end

  -- Adds to the list of a reply the permits of others among which a denied request finds the one that it waits for. A range
  -- of `denied` is in units, counted from the permit that ends first; what lies between ranges is one permit.
  local function add_others(set, list)
    local key, held_units, left, done = set.key, 0, set.units, 0
    local ranks, first = {}, redis.call('ZCARD', key) - set.count
    for name, one in pairs(set.held) do
      held_units = held_units + one[1]
      if set.extra == 0 then
        ranks[#ranks + 1] = redis.call('ZRANK', key, name) - first
      end
    end
    local function add(some, from)
      for i = from, #some, 2 do
        local name, units = split_member(some[i], set)
        if not set.held[name] then
          append(list, others, units, number(some[i + 1]))
          left = left - units
        end
        done = done + units
      end
    end
    if set.extra > 0 then
      -- Permits of several units have no rank by units: all of them, from the first on.
      local last, rank = 0, first
      for _, range in ipairs(set.denied) do
        last = range[2] > last and range[2] or last
      end
      while done < last + held_units and rank < first + set.count do
        add(redis.call('ZRANGE', key, rank, rank + 99, 'WITHSCORES'), 1)
        rank = rank + 100
      end
    else
      table.sort(set.denied, function(one, other)
        return one[1] < other[1]
      end)
      for _, range in ipairs(set.denied) do
        local from, to = range[1] > done and range[1] or done + 1, range[2] + held_units
        to = to < set.count and to or set.count
        if from <= to then
          local between = from - 1 - done
          local some = redis.call('ZRANGE', key, first + from - (between > 0 and 2 or 1), first + to - 1, 'WITHSCORES')
          for _, rank in ipairs(ranks) do
            if rank >= done and rank < from - 1 then
              between = between - 1
            end
          end
          if between > 0 then
            append(list, others, between, number(some[2]))
            left = left - between
          end
          local skipped = from - 1 > done
          done = from - 1
          add(some, skipped and 3 or 1)
        end
      end
    end
    if left > 0 then
      append(list, others, left, set.latest)
    end
  end

  -- Puts the short list into the reply, in place of the text that only says that there is a set.
  local function describe(c, set)
    local list = { 'p', 0 }
    for i = 3, #set.list, 3 do
      if set.list[i] ~= others or set.units == 0 or not set.denied[1] then
        append(list, set.list[i], set.list[i + 1], set.list[i + 2])
      end
    end
    if set.units > 0 and set.denied[1] then
      add_others(set, list)
    end
    local fields = { digits(set.list[2]) }
    for i = 3, #list do
      fields[i - 1] = type(list[i]) == 'number' and digits(list[i]) or list[i]
    end
    local value, head = kept[owner[c]], ';' .. names[c] .. ':'
    local from = value:find(head, 1, true)
    local stop = value:find(';', from + 1, true) or #value + 1
    kept[owner[c]] = value:sub(1, from - 1) .. head .. 'p' .. table.concat(fields, ',') .. value:sub(stop)
  end

  -- Divides the new permits of counter c between the text and the set. What is written to the set goes to `queue`: nothing may
  -- fail after the first write.
  local function place(c, set)
    local found, name = entries[owner[c]], names[c]
    local list = found[name]
    if not set.exists then
      read_ask(set)
    end
    local fields, in_text, want, units, latest, bound = { digits(list[2]) }, 0, {}, 0, 0, nil
    for i = 3, #list, 3 do
      local holder, n, deadline = list[i], list[i + 1], list[i + 2]
      local member = holder == '0' and '0:' .. digits(deadline) or holder
      -- What is in the text stays there until its holder comes again: a node of a former version finds it only there.
      local stays = set.text[member] and not set.ids[holder]
      if holder ~= others and (stays or not set.exists and in_text < max_in_text) then
        in_text = in_text + 1
        append(fields, holder, digits(n), digits(deadline))
      else
        units, latest = units + n, deadline > latest and deadline or latest
        if holder == others then
          bound = deadline
        else
          want[member] = { n + (want[member] and want[member][1] or 0), deadline }
        end
      end
    end
    local key, extra = set.key, set.extra
    local function run(...)
      queue[#queue + 1] = { ... }
    end
    if not set.exists then
      if not next(want) then
        return
      end
      local before = redis.pcall('ZCARD', key)
      if not may_use(set, before) or not may_use(set, redis.pcall('PEXPIRE', key, 1)) then
        -- All in the text, as former versions had it.
        return
      elseif before > 0 then
        -- Left behind by a bundle that somebody deleted.
        run('DEL', key)
      end
    else
      run('ZREMRANGEBYSCORE', key, 0, digits(now))
      for _, expired in ipairs(set.expired) do
        run('ZREM', key, expired)
      end
      if bound and bound < set.latest then
        -- A clock went back, or permits may be held for less time than before.
        local joined = '0:' .. digits(bound)
        for _, member in ipairs(redis.call('ZRANGEBYSCORE', key, '(' .. digits(bound), '+inf')) do
          local whose, n = split_member(member, set)
          if not set.held[whose] and whose:sub(1, 2) == '0:' then
            set.held[whose] = { n, 0 }
            want[joined] = { n + (want[joined] and want[joined][1] or 0), bound }
          elseif not set.held[whose] then
            run('ZADD', key, digits(bound), member)
          end
        end
      end
      for member, one in pairs(want) do
        if not set.held[member] and member:sub(1, 2) == '0:' then
          local n, deadline = find_member(set, member)
          if n then
            set.held[member], one[1] = { n, deadline }, one[1] + n
          end
        end
      end
    end
    for member, one in pairs(set.held) do
      if not want[member] or want[member][1] ~= one[1] then
        run('ZREM', key, member, one[1] > 1 and member .. text(',%d', one[1]) or nil)
        extra = extra - one[1] + 1
      end
    end
    for member, one in pairs(want) do
      local before, n, deadline = set.held[member], one[1], digits(one[2])
      local full = n > 1 and member .. text(',%d', n) or member
      if before and before[1] == n then
        if before[2] ~= one[2] then
          run('ZADD', key, deadline, full)
        end
      elseif n > 1 then
        run('ZADD', key, text('-%d', n), member, deadline, full)
      else
        run('ZADD', key, deadline, member)
      end
      if not before or before[1] ~= n then
        extra = extra + n - 1
      end
    end
    if units == 0 then
      run('DEL', key)
    else
      if extra ~= (set.stored_extra or 0) then
        run(extra > 0 and 'ZADD' or 'ZREM', key, extra > 0 and text('-%d', extra) or '#', extra > 0 and '#' or nil)
      end
      local life = floor((latest - now) / 1000) + 1
      run('PEXPIRE', key, digits(life + fresh + floor((life / 16 + 100) * (now % 1000) / 1000)))
      append(fields, others, digits(units), digits(latest))
    end
    found[name] = #fields > 1 and 'p' .. table.concat(fields, ',') or nil
  end

  set_steps = { open = open, describe = describe, place = place }
  return set_steps
end

for c = 1, counters do
  local state, asked = states[c], asked_sets[c]
  local set = asked and { asked = asked }
  sets[c] = set
  if state and type(state) == 'table' and state[1] == 'p' then
    for i = 3, #state, 3 do
      if state[i] == others and not set then
        -- Of a limit that needs none; another limit of the same counter did. It is asked again, with the key.
        error('permits are in a set')
      elseif state[i] == others then
        set.before = state
        with_sets().open(c, set, state[i + 1], state[i + 2])
      end
    end
    if set then
      set.before = state
    end
  end
end
