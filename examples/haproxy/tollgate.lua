-- Checks a request with Tollgate. Only the headers set here are sent, so that a client cannot forge them.
local url = "http://127.0.0.1:8080/check"
-- How long to wait for a decision, in milliseconds: longer than the longest delay (`max_delay_ms`, 5000).
local timeout = 6000

-- The client's headers that identify keys and users.
local passed_on = { "x-api-key", "authorization" }

core.register_action("tollgate", { "http-req" }, function(txn)
  local headers = {
    ["x-forwarded-for"] = { txn.sf:src() },
    ["x-forwarded-method"] = { txn.sf:method() },
    ["x-forwarded-uri"] = { txn.sf:pathq() },
    ["x-forwarded-host"] = { txn.sf:req_hdr("host") },
  }
  for _, name in ipairs(passed_on) do
    local value = txn.sf:req_hdr(name)
    if value ~= nil and value ~= "" then
      headers[name] = { value }
    end
  end

  local answer = core.httpclient():get{ url = url, headers = headers, timeout = timeout }
  -- HAProxy's client reports a failed connection as a 503 or 504 page of its own; Tollgate never sends HTML.
  local kind = answer and answer.headers and answer.headers["content-type"]
  local page = kind and kind[0] and kind[0]:find("text/html", 1, true)
  if answer == nil or answer.status == nil or answer.status == 0 or page then
    txn:set_var("txn.tollgate", "unreachable")
    return
  end
  local function first(name)
    local values = answer.headers and answer.headers[name]
    return values and values[0]
  end

  if answer.status == 200 then
    for variable, name in pairs({ ratelimit = "ratelimit", ratelimit_policy = "ratelimit-policy" }) do
      if first(name) then
        txn:set_var("txn." .. variable, first(name))
      end
    end
    local degraded = first("x-ratelimit-degraded")
    txn.http:req_del_header("x-ratelimit-degraded")
    if degraded then
      txn.http:req_set_header("x-ratelimit-degraded", degraded)
    end
    return
  end

  -- The denial as Tollgate wrote it.
  local reply = txn:reply{ status = answer.status, body = answer.body }
  for name, values in pairs(answer.headers) do
    if name ~= "content-length" and name ~= "connection" and name ~= "date" then
      for _, value in pairs(values) do
        reply:add_header(name, value)
      end
    end
  end
  txn:done(reply)
end)
