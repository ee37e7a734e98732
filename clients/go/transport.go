package tollgate

import (
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"slices"
	"sync"
	"time"
)

// Transport is an [http.RoundTripper] that respects the limits of the APIs it calls: it honors Retry-After, RateLimit and
// X-RateLimit fields, spreads what remains over the time to the reset, backs off with full jitter within a retry budget,
// and throttles itself while most requests are refused. Each host has its own state.
//
//	client := &http.Client{Transport: &tollgate.Transport{}}
type Transport struct {
	// Base sends the requests; http.DefaultTransport if nil.
	Base http.RoundTripper
	// MaxRetries is the number of retries of one request beside the budget of all; 3 if zero, negative is none.
	MaxRetries int
	// MaxWait is the longest pause before a request; a longer one is a [ThrottledError]. A minute if zero.
	MaxWait time.Duration
	// RetryNonIdempotent also retries POST and PATCH.
	RetryNonIdempotent bool

	lock  sync.Mutex
	hosts map[string]*hostState
}

// ThrottledError is the error of a request that was not sent.
type ThrottledError struct {
	Host, Reason string
	// RetryAfter is when it could be sent; Unknown if most requests are refused.
	RetryAfter time.Duration
}

func (e *ThrottledError) Error() string { return fmt.Sprintf("%s: %s", e.Host, e.Reason) }

type hostState struct {
	pacer    *pacer
	budget   *retryBudget
	throttle adaptiveThrottle
	used     int64
}

const maxHosts = 1_024

var (
	idempotent     = []string{"GET", "HEAD", "OPTIONS", "PUT", "DELETE", "TRACE"}
	transportStart = time.Now()
)

func monotonicMs() int64 { return time.Since(transportStart).Milliseconds() }

// RoundTrip sends a request with its retries.
func (t *Transport) RoundTrip(request *http.Request) (*http.Response, error) {
	base, most, retries := t.Base, t.MaxWait, t.MaxRetries
	if base == nil {
		base = http.DefaultTransport
	}
	if most == 0 {
		most = time.Minute
	}
	if retries == 0 {
		retries = 3
	}
	isRepeatable := request.Body == nil || request.Body == http.NoBody || request.GetBody != nil
	mayRetry := isRepeatable && (t.RetryNonIdempotent || slices.Contains(idempotent, request.Method))
	host := t.host(request.URL.Host)
	for attempt := 0; ; attempt++ {
		delay, throttled := t.admit(host, request.URL.Host, most, attempt == 0)
		var response *http.Response
		var failure error
		said := signals{wait: -1}
		switch {
		case throttled == nil:
			if err := pause(request.Context(), delay); err != nil {
				t.failed(host)
				return nil, err
			}
			if response, failure = t.send(base, request, attempt); failure != nil {
				t.failed(host)
				if request.Context().Err() != nil {
					return nil, failure
				}
				break
			}
			said = t.record(host, response)
			if !said.refused && response.StatusCode != 502 && response.StatusCode != 504 {
				return response, nil
			}
		case throttled.RetryAfter >= 0:
			return nil, throttled
		default:
			failure = throttled
		}
		wait := millis(backoffMs(attempt, rand.Float64(), said.wait))
		if !mayRetry || attempt >= retries || wait > most || !t.mayRetry(host) {
			return response, failure
		}
		if response != nil {
			_, _ = io.Copy(io.Discard, io.LimitReader(response.Body, 65_536))
			response.Body.Close()
		}
		if err := pause(request.Context(), wait); err != nil {
			return nil, err
		}
	}
}

func (t *Transport) send(base http.RoundTripper, request *http.Request, attempt int) (*http.Response, error) {
	if attempt > 0 && request.GetBody != nil {
		body, err := request.GetBody()
		if err != nil {
			return nil, err
		}
		request = request.Clone(request.Context())
		request.Body = body
	}
	return base.RoundTrip(request)
}

func (t *Transport) host(name string) *hostState {
	t.lock.Lock()
	defer t.lock.Unlock()
	if t.hosts == nil {
		t.hosts = map[string]*hostState{}
	}
	host, ok := t.hosts[name]
	if !ok {
		if len(t.hosts) >= maxHosts {
			oldest := ""
			for each, state := range t.hosts {
				if oldest == "" || state.used < t.hosts[oldest].used {
					oldest = each
				}
			}
			delete(t.hosts, oldest)
		}
		host = &hostState{pacer: newPacer(), budget: newRetryBudget()}
		t.hosts[name] = host
	}
	host.used = monotonicMs()
	return host
}

// admit takes a slot, and returns the delay before it.
func (t *Transport) admit(host *hostState, name string, most time.Duration, isFirst bool) (time.Duration, *ThrottledError) {
	t.lock.Lock()
	defer t.lock.Unlock()
	now := monotonicMs()
	if isFirst {
		host.budget.request()
	}
	isRejected := host.throttle.requests >= throttleMinimum && rand.Float64() < host.throttle.probability(now)
	host.throttle.request(now)
	if isRejected {
		return 0, &ThrottledError{name, "it refuses most requests; try again later", Unknown}
	}
	delay := millis(host.pacer.send(now))
	if delay > most {
		host.pacer.failed()
		return 0, &ThrottledError{name, fmt.Sprintf("it allows no request for %s", delay), delay}
	}
	return delay, nil
}

func (t *Transport) failed(host *hostState) {
	t.lock.Lock()
	defer t.lock.Unlock()
	host.pacer.failed()
}

func (t *Transport) record(host *hostState, response *http.Response) signals {
	said := readSignals(response.StatusCode, limitFields(response.Header), time.Now().UnixMilli())
	t.lock.Lock()
	defer t.lock.Unlock()
	now := monotonicMs()
	host.pacer.response(now, said, rand.Float64())
	if !said.refused {
		host.throttle.accept(now)
	}
	return said
}

func (t *Transport) mayRetry(host *hostState) bool {
	t.lock.Lock()
	defer t.lock.Unlock()
	return host.budget.retry()
}

func pause(ctx context.Context, delay time.Duration) error {
	if delay <= 0 {
		return ctx.Err()
	}
	timer := time.NewTimer(delay)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-timer.C:
		return nil
	}
}
