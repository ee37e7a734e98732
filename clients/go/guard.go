package tollgate

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"time"
)

// Permits tells what a [Guard] does with permits of concurrency limits. They can only be given back if they were
// reserved, and giving back is a second request to the server.
type Permits int

const (
	// AutoPermits reserves on an endpoint until an answer shows that none of its limits is a concurrency limit.
	AutoPermits Permits = iota
	// AllPermits reserves on every request.
	AllPermits
	// NoPermits leaves permits to their ttl.
	NoPermits
)

// GuardOptions are the settings of a [Guard].
type GuardOptions struct {
	// Cost is the cost of a request; 1 if nil.
	Cost func(*http.Request) int64
	// Attributes are checked besides what identifies the caller.
	Attributes func(*http.Request) map[string]string
	// Skip returns whether a request passes unchecked.
	Skip func(*http.Request) bool
	// Permits says whether permits are given back when the response ends.
	Permits Permits
	// PermitTTL is the longest time that a response may take before its permit expires; a minute if zero.
	PermitTTL time.Duration
	// MaxDelay is the longest delay (`action: delay`) that is waited for; 30 s if zero. Longer ones get 503.
	MaxDelay time.Duration
}

const (
	maxEndpoints = 1_024
	maxSegments  = 8
)

// segmentName is a segment that looks like a name, not like an id.
var segmentName = regexp.MustCompile(`^[A-Za-z][A-Za-z_.-]{0,31}$`)

// Guard limits the callers of a server. Fields and bodies are those of the gateway, so that callers need not know which
// of the two stands before a service.
type Guard struct {
	client  *Client
	options GuardOptions

	lock         sync.Mutex
	isConcurrent map[string]bool
}

// Guard returns a guard with its own settings; see [Client.Middleware] for one without.
func (c *Client) Guard(options GuardOptions) *Guard {
	if options.PermitTTL == 0 {
		options.PermitTTL = time.Minute
	}
	if options.MaxDelay == 0 {
		options.MaxDelay = 30 * time.Second
	}
	return &Guard{client: c, options: options, isConcurrent: map[string]bool{}}
}

// Middleware limits the callers of a handler: it asks, responds to denied requests with 429, 503, 400 or 401, adds the
// rate limit fields, and gives permits back when the handler returns. The fail policy is the client's.
//
//	http.ListenAndServe(":8000", limiter.Middleware(mux))
func (c *Client) Middleware(next http.Handler) http.Handler {
	return c.Guard(GuardOptions{}).Middleware(next)
}

type resultKey struct{}

// FromContext returns the result of the check of the request that a handler serves.
func FromContext(ctx context.Context) (Result, bool) {
	result, ok := ctx.Value(resultKey{}).(Result)
	return result, ok
}

// Middleware limits the callers of a handler.
func (g *Guard) Middleware(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, request *http.Request) {
		if g.options.Skip != nil && g.options.Skip(request) {
			next.ServeHTTP(w, request)
			return
		}
		cost, attributes := int64(1), map[string]string(nil)
		if g.options.Cost != nil {
			cost = g.options.Cost(request)
		}
		if g.options.Attributes != nil {
			attributes = g.options.Attributes(request)
		}
		admission := g.Admit(request.Context(), HeadOf(request), cost, attributes)
		defer admission.Done()
		if request.Context().Err() != nil {
			return
		}
		for name, values := range admission.Header {
			w.Header()[name] = values
		}
		if admission.Status != http.StatusOK {
			w.WriteHeader(admission.Status)
			_, _ = w.Write(admission.Body)
			return
		}
		next.ServeHTTP(w, request.WithContext(admission.Context(request.Context())))
	})
}

// Admission is the decision about one received request. Frameworks other than net/http respond with it themselves.
type Admission struct {
	Result Result
	// Status is 200 if the request may pass; else 429, 503, 400 or 401.
	Status int
	// Header has the rate limit fields of the response, Body the problem document if the request may not pass.
	Header http.Header
	Body   []byte
	// RetryAfter is what the Retry-After field says; negative if there is none.
	RetryAfter time.Duration

	done func()
}

// Context returns a context from which [FromContext] returns the result.
func (a *Admission) Context(ctx context.Context) context.Context {
	return context.WithValue(ctx, resultKey{}, a.Result)
}

// Done gives the permit of a concurrency limit back, once and in the background. Call it when the response has ended.
func (a *Admission) Done() { a.done() }

// Admit checks a received request, and waits as long as a delayed one has to. Done must be called on what it returns.
func (g *Guard) Admit(ctx context.Context, head Head, cost int64, attributes map[string]string) *Admission {
	wanted := request{subject: Request(head, attributes), cost: cost}
	endpoint := endpointOf(head)
	if cost > 0 && g.mayHold(endpoint) {
		wanted.isReservation, wanted.ttl = true, g.options.PermitTTL
	}
	found := g.client.check(ctx, wanted)
	// A denial says nothing of the other limits.
	if found.result.Source == "server" && (found.result.Allowed || found.holdsPermit) {
		g.learn(endpoint, found.holdsPermit)
	}
	admission := &Admission{Result: found.result, Header: http.Header{}, RetryAfter: Unknown, done: g.release(ctx, found, cost)}
	for _, field := range limitFields(found.headers) {
		admission.Header.Add(field[0], field[1])
	}
	switch {
	case !found.result.Allowed:
		admission.deny(found)
	case found.result.Delay > g.options.MaxDelay:
		admission.unavailable(wholeSeconds(found.result.Delay))
		admission.Done()
	default:
		admission.Status = http.StatusOK
		_ = pause(ctx, found.result.Delay)
	}
	return admission
}

// endpointOf returns a method and the shape of a path, `GET /users/*`: endpoints are the server's to tell.
func endpointOf(head Head) string {
	path, _, _ := strings.Cut(head.Path, "?")
	segments := strings.Split(path, "/")
	segments = segments[min(1, len(segments)):min(maxSegments+1, len(segments))]
	for at, segment := range segments {
		if segment != "" && !segmentName.MatchString(segment) {
			segments[at] = "*"
		}
	}
	method := head.Method
	// Callers may invent methods, of any length.
	if !segmentName.MatchString(method) {
		method = "*"
	}
	return method + " /" + strings.Join(segments, "/")
}

func (g *Guard) mayHold(endpoint string) bool {
	if g.options.Permits != AutoPermits {
		return g.options.Permits == AllPermits
	}
	g.lock.Lock()
	defer g.lock.Unlock()
	known, ok := g.isConcurrent[endpoint]
	return known || !ok
}

func (g *Guard) learn(endpoint string, isConcurrent bool) {
	g.lock.Lock()
	defer g.lock.Unlock()
	known, ok := g.isConcurrent[endpoint]
	// Some callers of an endpoint may have a limit that others do not.
	if ok && (known || !isConcurrent) {
		return
	}
	if !ok && len(g.isConcurrent) >= maxEndpoints {
		for any := range g.isConcurrent {
			delete(g.isConcurrent, any)
			break
		}
	}
	g.isConcurrent[endpoint] = isConcurrent
}

// release returns what gives the permit back. It is not canceled with the caller. A reservation without a permit is ended
// as well: the server keeps it until then.
func (g *Guard) release(ctx context.Context, found checked, cost int64) func() {
	if found.result.reservation == "" {
		return func() {}
	}
	return sync.OnceFunc(func() {
		g.client.pending.Add(1)
		go func() {
			defer g.client.pending.Done()
			document := map[string]any{"reservation": found.result.reservation, "cost": cost}
			g.client.end(context.WithoutCancel(ctx), "/v1/settle", found.server, document)
		}()
	})
}

const problemTypes = "https://iana.org/assignments/http-problem-types#"

func (a *Admission) deny(found checked) {
	result := found.result
	switch result.Reason {
	case "rejected":
		a.reject(found.problem)
		return
	case "denied":
	default:
		a.unavailable(max(1, a.retryAfter()))
		return
	}
	document, detail := map[string]any{}, "Rate limit exceeded."
	if wait := a.retryAfter(); wait >= 0 {
		a.retry(wait)
		detail += " Retry after " + plural(wait) + "."
		document["retry_after"] = wait
	}
	if result.Rule != "" {
		document["violated-policies"] = []string{result.Rule}
	}
	status, own := http.StatusTooManyRequests, result.Response
	if own != nil && own.Status != 0 {
		status = own.Status
	}
	a.respond(status, "quota-exceeded", "Over the limit", detail, document)
	if own != nil && own.Body != nil {
		a.Body = own.Body
		a.Header.Set("Content-Type", cmp.Or(own.ContentType, "application/json"))
	}
}

// retryAfter returns the seconds after which the same request would pass; negative if unknown.
func (a *Admission) retryAfter() int64 {
	if seconds, err := strconv.ParseInt(a.Header.Get("Retry-After"), 10, 64); err == nil && seconds >= 0 {
		return seconds
	}
	if a.Result.RetryAfter < 0 {
		return -1
	}
	return max(1, wholeSeconds(a.Result.RetryAfter))
}

func (a *Admission) unavailable(wait int64) {
	a.retry(wait)
	detail := "The request could not be checked. Retry after " + plural(wait) + "."
	document := map[string]any{"retry_after": wait}
	a.respond(http.StatusServiceUnavailable, "temporary-reduced-capacity", "Temporarily unavailable", detail, document)
}

func (a *Admission) reject(found *problem) {
	if found.isCallers() {
		a.Status, a.Body = found.status, found.text
	} else if found != nil && found.status == http.StatusRequestEntityTooLarge {
		a.Status = http.StatusRequestHeaderFieldsTooLarge
		a.Body = []byte(`{"type":"about:blank","title":"Request header fields too large","status":431,` +
			`"detail":"The header fields are too large to be checked."}`)
	} else {
		a.Status = http.StatusBadRequest
		a.Body = []byte(`{"type":"about:blank","title":"Bad request","status":400,"detail":"The request could not be checked."}`)
	}
	if a.Status == http.StatusUnauthorized {
		a.Header.Set("WWW-Authenticate", "Bearer")
	}
	a.Header.Set("Content-Type", "application/problem+json")
}

func (a *Admission) respond(status int, kind, title, detail string, document map[string]any) {
	document["type"], document["title"], document["status"], document["detail"] = problemTypes+kind, title, status, detail
	if a.Result.DecisionID != "" {
		document["decision_id"] = a.Result.DecisionID
	}
	a.Status = status
	a.Body, _ = json.Marshal(document)
	a.Header.Set("Content-Type", "application/problem+json")
}

func (a *Admission) retry(wait int64) {
	a.RetryAfter = millis(min(wait, maxInteger/1000) * 1000)
	a.Header.Set("Retry-After", strconv.FormatInt(wait, 10))
}

func wholeSeconds(d time.Duration) int64 {
	seconds := int64(d / time.Second)
	if d%time.Second > 0 {
		seconds++
	}
	return seconds
}

func plural(seconds int64) string {
	if seconds == 1 {
		return "1 second"
	}
	return fmt.Sprintf("%d seconds", seconds)
}
