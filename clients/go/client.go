// Package tollgate is the client of Tollgate, the rate limiter: it asks whether requests may pass ([Client]), guards
// servers ([Client.Middleware]), and respects the limits of other APIs ([Transport]).
//
//	limiter, err := tollgate.New("sample", tollgate.Options{Servers: []string{"http://127.0.0.1:8080"}})
//	if !limiter.Limit(ctx, tollgate.Key("key-1")).Allowed { … }
package tollgate

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"net/http"
	"net/url"
	"sort"
	"strings"
	"sync"
	"time"
)

const (
	noDeadline = math.MaxInt64
	// How long a hedged reservation waits for its cancellation; then it stands, as a check's charge does.
	hedgeTTL = 10 * time.Second
	// How long a request goes on after the deadline if its charge would have to be given back.
	lateTime = time.Second
)

// HedgeAtP95 is an [Options.HedgeAfter]: the 95th percentile of the latency that the client has measured lately, of the first
// request of each call. It is at least 1 ms, and 3 ms until 100 are measured.
const HedgeAtP95 time.Duration = -1

// Options are the settings of a [Client]. The zero value asks http://127.0.0.1:8080 and fails open.
type Options struct {
	// Servers are base URLs of the HTTP API, in the order in which to ask them.
	Servers []string
	// Attribute is what a [Key] is the value of; "api_key" if empty.
	Attribute string
	// Timeout bounds every call, all servers together; 50 ms if zero. A context's deadline shortens it.
	Timeout time.Duration
	// FailClosed denies if no server answers; otherwise requests are allowed.
	FailClosed bool
	// HedgeAfter asks a second server if the first has not answered by then, for at most a tenth of the calls; zero is off,
	// 3 ms a good value on one network, and [HedgeAtP95] is measured.
	HedgeAfter time.Duration
	// DenyCache is the number of denials that this process repeats by itself; 10,000 if zero, negative is off.
	DenyCache int
	// Token is a bearer token for the servers, or for a proxy before them.
	Token string
	// HTTPClient sends the requests: its transport has certificates and connections. Redirects are not followed.
	HTTPClient *http.Client
	// OnFault is called for each server that could not be used.
	OnFault func(server, reason string)
}

// Client asks Tollgate servers whether requests may pass. It is safe for concurrent use. No call fails because of a
// server or the network: the fail policy decides then, and the result says so.
type Client struct {
	domainJSON string
	// keyPrefix is the JSON before the value of a Key.
	keyPrefix string
	options   Options
	failover  *failover
	hedges    *hedgeBudget
	latency   *latencyP95
	cache     *denyCache
	started   time.Time
	pending   sync.WaitGroup
}

// Subject is what is checked: see [Key], [Attributes], [Descriptors] and [Request].
type Subject struct {
	field string
	value any
}

// Key is a caller's identifier, the value of Options.Attribute.
func Key(key string) Subject { return Subject{field: "key", value: key} }

// Attributes match every rule whose keys they contain.
func Attributes(attributes map[string]string) Subject {
	return Subject{field: "attributes", value: attributes}
}

// Descriptor is one list of entries, as Envoy sends them.
type Descriptor [][2]string

// Descriptors match one rule each.
func Descriptors(descriptors ...Descriptor) Subject {
	type entries struct {
		Entries Descriptor `json:"entries"`
	}
	list := make([]entries, len(descriptors))
	for at, each := range descriptors {
		list[at] = entries{each}
	}
	return Subject{field: "descriptors", value: list}
}

// New returns a client for one domain of rules.
func New(domain string, options Options) (*Client, error) {
	if domain == "" {
		return nil, errors.New("tollgate: no domain; write the domain of a rule file")
	}
	if len(options.Servers) == 0 {
		options.Servers = []string{"http://127.0.0.1:8080"}
	}
	servers := make([]string, len(options.Servers))
	for at, each := range options.Servers {
		parsed, err := url.Parse(each)
		if err != nil || parsed.Host == "" || parsed.Scheme != "http" && parsed.Scheme != "https" || parsed.RawQuery != "" {
			return nil, fmt.Errorf("tollgate: %q is not a server; write http://HOST:PORT or https://HOST:PORT", each)
		}
		servers[at] = strings.TrimSuffix(each, "/")
	}
	options.Servers = servers
	if options.Attribute == "" {
		options.Attribute = "api_key"
	}
	if options.Timeout == 0 {
		options.Timeout = 50 * time.Millisecond
	}
	if options.Timeout < 0 {
		return nil, errors.New("tollgate: Timeout is negative")
	}
	if options.HedgeAfter < 0 && options.HedgeAfter != HedgeAtP95 {
		return nil, fmt.Errorf("tollgate: HedgeAfter is %v; write a time such as 3*time.Millisecond, or HedgeAtP95", options.HedgeAfter)
	}
	if options.DenyCache == 0 {
		options.DenyCache = denyCacheSize
	}
	sender := http.Client{}
	if options.HTTPClient != nil {
		sender = *options.HTTPClient
	} else {
		transport := http.DefaultTransport.(*http.Transport).Clone()
		transport.MaxIdleConnsPerHost = 64
		transport.MaxResponseHeaderBytes = maxBody
		// Answers are short, and what a compressed one becomes is not.
		transport.DisableCompression = true
		sender.Transport = transport
	}
	// A redirect is another program: following it would send the token there.
	sender.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
	options.HTTPClient = &sender
	domainJSON, _ := json.Marshal(domain)
	attribute, _ := json.Marshal(options.Attribute)
	return &Client{
		domainJSON: string(domainJSON), keyPrefix: `"attributes":{` + string(attribute) + ":", options: options, failover: newFailover(len(servers)), hedges: newHedgeBudget(), latency: newLatencyP95(), cache: newDenyCache(options.DenyCache),
		started: time.Now(),
	}, nil
}

// Limit charges one unit if every matching limit allows it.
func (c *Client) Limit(ctx context.Context, subject Subject) Result { return c.LimitN(ctx, subject, 1) }

// LimitN charges a cost; 0 is a peek.
func (c *Client) LimitN(ctx context.Context, subject Subject, cost int64) Result {
	return c.check(ctx, request{subject: subject, cost: cost}).result
}

// Peek is LimitN without charging anything.
func (c *Client) Peek(ctx context.Context, subject Subject) Result { return c.LimitN(ctx, subject, 0) }

// LimitBatch checks several subjects at the same time; results are in their order.
func (c *Client) LimitBatch(ctx context.Context, subjects []Subject) []Result {
	results, slots := make([]Result, len(subjects)), make(chan struct{}, 32)
	var group sync.WaitGroup
	for at, subject := range subjects {
		slots <- struct{}{}
		group.Add(1)
		go func() {
			defer group.Done()
			results[at] = c.Limit(ctx, subject)
			<-slots
		}()
	}
	group.Wait()
	return results
}

// ReserveOptions are the settings of one reservation.
type ReserveOptions struct {
	// Cost is the estimate; 1 if zero.
	Cost int64
	// TTL is the time after which the reservation stands as it is; a minute if zero.
	TTL time.Duration
	// IdempotencyKey returns the same reservation for the same key.
	IdempotencyKey string
}

// Reservation is an estimated charge, to be settled or canceled.
type Reservation struct {
	Result
	client *Client
	server int
	keys   [2]string
}

// Reserve charges an estimate.
func (c *Client) Reserve(ctx context.Context, subject Subject, options ReserveOptions) *Reservation {
	if options.Cost == 0 {
		options.Cost = 1
	}
	wanted := request{subject, options.Cost, true, options.TTL, options.IdempotencyKey}
	checked := c.check(ctx, wanted)
	text := wanted.subjectJSON(c)
	return &Reservation{checked.result, c, checked.server, [2]string{cacheKey(text, false), cacheKey(text, true)}}
}

// ID is the reservation's id at its server; empty if there is none.
func (r *Reservation) ID() string { return r.reservation }

// Settle replaces the estimate by the actual cost.
func (r *Reservation) Settle(ctx context.Context, cost int64) Ended {
	return r.end(ctx, "/v1/settle", map[string]any{"reservation": r.reservation, "cost": cost})
}

// Cancel refunds everything.
func (r *Reservation) Cancel(ctx context.Context) Ended {
	return r.end(ctx, "/v1/cancel", map[string]any{"reservation": r.reservation})
}

func (r *Reservation) end(ctx context.Context, path string, document map[string]any) Ended {
	if r.reservation == "" {
		return Ended{Reason: "unknown"}
	}
	ended := r.client.end(ctx, path, r.server, document)
	// There may be room again.
	r.client.cache.clear(r.keys[0])
	r.client.cache.clear(r.keys[1])
	return ended
}

// ClearDenyCache forgets cached denials, for example after a limit was raised.
func (c *Client) ClearDenyCache() { c.cache.clearAll() }

// Close waits for charges that are being given back.
func (c *Client) Close() { c.pending.Wait() }

type request struct {
	subject        Subject
	cost           int64
	isReservation  bool
	ttl            time.Duration
	idempotencyKey string
}

type checked struct {
	decoded
	headers http.Header
	server  int
}

// byPolicy returns what the fail policy decides.
func (c *Client) byPolicy(reason string) checked {
	return checked{decoded: decoded{result: policyResult(!c.options.FailClosed, reason)}}
}

// subjectJSON returns the subject as the members of a JSON object.
func (r request) subjectJSON(c *Client) string {
	field, value := r.subject.field, r.subject.value
	if head, ok := value.(headSubject); ok {
		return head.json()
	}
	if field == "key" {
		text, _ := json.Marshal(value)
		return c.keyPrefix + string(text) + "}"
	}
	text, err := json.Marshal(value)
	if err != nil {
		text = []byte("null")
	}
	return `"` + field + `":` + string(text)
}

// cacheKey identifies the subject and kind of a request in the deny cache.
func cacheKey(subject string, isReservation bool) string {
	if isReservation {
		return "reserve " + subject
	}
	return subject
}

func (c *Client) now() int64 { return time.Since(c.started).Milliseconds() }

func (c *Client) check(ctx context.Context, wanted request) checked {
	started := c.now()
	subject := wanted.subjectJSON(c)
	key := cacheKey(subject, wanted.isReservation)
	// Heads of one caller differ in fields that do not identify it, so a denial of one would not be found again.
	mayCache := wanted.subject.field != "request" && len(key) <= maxCacheKey
	if mayCache && wanted.idempotencyKey == "" {
		if hit, ok := c.cache.lookup(key, wanted.cost, started); ok {
			return checked{decoded: decoded{result: hit}}
		}
	}
	deadline := deadlineOf(c.options.Timeout.Milliseconds(), callerDeadline(ctx))
	isHedged := c.options.HedgeAfter != 0 && len(c.options.Servers) > 1 && wanted.cost > 0
	var body bytes.Buffer
	body.WriteString(`{"domain":`)
	body.WriteString(c.domainJSON)
	body.WriteByte(',')
	body.WriteString(subject)
	if wanted.cost != 1 {
		fmt.Fprintf(&body, `,"cost":%d`, wanted.cost)
	}
	if wanted.isReservation && wanted.ttl > 0 {
		fmt.Fprintf(&body, `,"deadline_ms":%d`, wanted.ttl.Milliseconds())
	} else if isHedged && !wanted.isReservation {
		fmt.Fprintf(&body, `,"deadline_ms":%d`, hedgeTTL.Milliseconds())
	}
	if wanted.idempotencyKey != "" {
		text, _ := json.Marshal(wanted.idempotencyKey)
		fmt.Fprintf(&body, `,"idempotency_key":%s`, text)
	}
	body.WriteByte('}')

	var found checked
	if wanted.isReservation || isHedged {
		order, share := c.failover.order(started), time.Duration(deadline/int64(len(c.options.Servers)))*time.Millisecond
		state := newHedge(order, share, share, nil)
		if isHedged {
			state = newHedge(order, c.hedgeAfter(), share, c.hedges)
		}
		found = c.reserved(ctx, body.Bytes(), deadline, state)
	} else {
		found = c.inTurn(ctx, body.Bytes(), deadline, started)
	}
	if mayCache {
		c.cache.store(key, wanted.cost, found.result, started)
	}
	return found
}

// hedgeAfter returns when the next server is asked.
func (c *Client) hedgeAfter() time.Duration {
	if c.options.HedgeAfter == HedgeAtP95 {
		return c.latency.get()
	}
	return c.options.HedgeAfter
}

// measured records how long the first request of a call took, if that decides when to hedge: also if a hedge was faster, or
// the estimate would sink with every hedge.
func (c *Client) measured(state *hedge, server int, latency time.Duration, err error) {
	if c.options.HedgeAfter == HedgeAtP95 && state.budget != nil && server == state.servers[0] {
		c.latency.record(latency, err != nil)
	}
}

// callerDeadline returns the milliseconds to the context's deadline.
func callerDeadline(ctx context.Context) int64 {
	if ctx.Err() != nil {
		return 0
	}
	if at, ok := ctx.Deadline(); ok {
		return max(0, time.Until(at).Milliseconds())
	}
	return noDeadline
}

// inTurn asks the servers one after the other until one answers.
func (c *Client) inTurn(ctx context.Context, body []byte, deadline, started int64) checked {
	order, reason := c.failover.order(started), faultTimeout
	for at, server := range order {
		elapsed := int64(0)
		if at > 0 {
			elapsed = c.now() - started
		}
		most, ok := attemptTime(deadline, elapsed, len(order)-at)
		if !ok {
			break
		}
		found, err := c.ask(ctx, server, "/v1/check", body, time.Duration(most)*time.Millisecond)
		if err == nil {
			return found
		}
		reason = err.Error()
	}
	return c.byPolicy(reason)
}

type answered struct {
	server int
	found  checked
	err    error
}

// reserved asks a second server if the first is slow; what a slower or late answer charged is given back.
func (c *Client) reserved(ctx context.Context, body []byte, deadline int64, state *hedge) checked {
	answers := make(chan answered, len(c.options.Servers))
	underWay, used := 0, ""
	send := func(server int, ok bool) {
		if !ok {
			return
		}
		underWay++
		go func() {
			// Not canceled with the caller: whether it was charged must become known.
			most := time.Duration(deadline)*time.Millisecond + lateTime
			sent := time.Now()
			found, err := c.ask(context.WithoutCancel(ctx), server, "/v1/reserve", body, most)
			c.measured(state, server, time.Since(sent), err)
			answers <- answered{server, found, err}
		}()
	}
	c.pending.Add(1)
	// Goes on in the background until every request has ended.
	defer func() {
		go func() {
			defer c.pending.Done()
			for range underWay {
				late := <-answers
				// With one idempotency key, servers that share a store return one reservation.
				if late.err == nil && late.found.result.reservation != "" && late.found.result.reservation != used {
					document := map[string]any{"reservation": late.found.result.reservation}
					c.end(context.WithoutCancel(ctx), "/v1/cancel", late.server, document)
				}
			}
		}()
	}()
	started := time.Now()
	end, timer := time.NewTimer(time.Duration(deadline)*time.Millisecond), time.NewTimer(state.askNext)
	defer end.Stop()
	defer timer.Stop()
	send(state.start())
	reason, found, isLate := faultTimeout, map[int]checked{}, false
	for !state.isOver() && !isLate {
		select {
		case <-ctx.Done():
			isLate = true
		case <-end.C:
			isLate = true
		case <-timer.C:
			send(state.timer())
			if state.timedOut >= 0 {
				c.fault(state.timedOut, faultTimeout)
			}
			if state.askNext >= 0 {
				timer.Reset(state.askNext - time.Since(started))
			}
		case each := <-answers:
			underWay--
			if each.err != nil {
				reason = each.err.Error()
				send(state.fault())
			} else {
				found[each.server] = each.found
				state.answer(each.server, verdictOf(each.found.result))
			}
		}
	}
	if isLate {
		reason = faultTimeout
		state.end()
	}
	winner, ok := found[state.winner]
	if !ok {
		return c.byPolicy(reason)
	}
	// What the other request has charged is given back, and with it the reason of the denial.
	if state.isUnconfirmed {
		winner.result.cacheable = false
	}
	used = winner.result.reservation
	return winner
}

// ask sends one request to one server, and records what its answer says about the server.
func (c *Client) ask(ctx context.Context, server int, path string, body []byte, most time.Duration) (checked, error) {
	status, headers, answer, err := c.post(ctx, server, path, body, most)
	if err == nil {
		var found decoded
		if found, err = decodeCheck(status, answer); err == nil {
			c.failover.answer(server)
			return checked{found, headers, server}, nil
		}
	}
	c.fault(server, err.Error())
	return checked{}, err
}

// fault records a server that gave no usable answer.
func (c *Client) fault(server int, reason string) {
	c.failover.fault(server, c.now())
	if c.options.OnFault != nil {
		c.options.OnFault(c.options.Servers[server], reason)
	}
}

func (c *Client) end(ctx context.Context, path string, server int, document map[string]any) Ended {
	body, _ := json.Marshal(document)
	status, _, answer, err := c.post(ctx, server, path, body, max(c.options.Timeout, lateTime))
	if err == nil {
		var ended Ended
		if ended, err = decodeEnded(status, answer); err == nil {
			return ended
		}
	}
	return Ended{Reason: err.Error()}
}

func (c *Client) post(ctx context.Context, server int, path string, body []byte, most time.Duration) (int, http.Header, []byte, error) {
	ctx, cancel := context.WithTimeout(ctx, most)
	defer cancel()
	wanted, err := http.NewRequestWithContext(ctx, http.MethodPost, c.options.Servers[server]+path, bytes.NewReader(body))
	if err != nil {
		return 0, nil, nil, fault(faultUnreachable)
	}
	wanted.Header.Set("Content-Type", "application/json")
	if c.options.Token != "" {
		wanted.Header.Set("Authorization", "Bearer "+c.options.Token)
	}
	response, err := c.options.HTTPClient.Do(wanted)
	if err != nil {
		return 0, nil, nil, networkFault(ctx)
	}
	defer response.Body.Close()
	answer, err := io.ReadAll(io.LimitReader(response.Body, maxBody+1))
	if err != nil {
		return 0, nil, nil, networkFault(ctx)
	}
	return response.StatusCode, response.Header, answer, nil
}

func networkFault(ctx context.Context) error {
	if ctx.Err() != nil {
		return fault(faultTimeout)
	}
	return fault(faultUnreachable)
}

// limitFields returns the rate limit fields of a response, which a guarded server passes on.
func limitFields(headers http.Header) [][2]string {
	var fields [][2]string
	for name, values := range headers {
		lower := strings.ToLower(name)
		if strings.HasPrefix(lower, "ratelimit") || strings.HasPrefix(lower, "x-ratelimit-") || lower == "retry-after" {
			for _, value := range values {
				fields = append(fields, [2]string{name, value})
			}
		}
	}
	sort.Slice(fields, func(a, b int) bool { return fields[a][0] < fields[b][0] })
	return fields
}
