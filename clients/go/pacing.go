package tollgate

import "math"

// Being limited well: pacing before the limit, backoff with full jitter, a retry budget, adaptive throttling. Pure state
// machines of time and random numbers; Transport drives them. The arithmetic is that of clients/conformance/README.md.

const (
	backoffBaseMs = 100
	backoffCapMs  = 10_000

	budgetMax     = 10_000
	budgetDeposit = 100
	budgetPrice   = 1_000

	throttleK       = 2
	throttleBuckets = 120
	// throttleMinimum is the number of requests below which nothing is rejected locally: too few to judge by.
	throttleMinimum = 10
)

// paceMs returns the delay that spreads what remains over the time to the reset; a limit of -1 is unknown.
func paceMs(limit, remaining, reset, sinceLast int64) int64 {
	if remaining == 0 {
		return reset
	}
	if limit >= 0 && 2*remaining > limit {
		return 0
	}
	return max(0, reset/remaining-sinceLast)
}

func backoffBound(attempt int) int64 {
	return min(backoffCapMs, int64(backoffBaseMs)<<min(attempt, 32))
}

func backoffMs(attempt int, random float64, wait int64) int64 {
	return max(0, wait) + int64(math.Floor(random*float64(backoffBound(attempt))))
}

// pacer paces the requests to one host.
type pacer struct {
	blockedUntil, remaining, limit, resetAt, last, inFlight int64
}

func newPacer() *pacer { return &pacer{remaining: -1, limit: -1, last: math.MinInt64} }

// send takes a slot for one request, and returns the delay before it.
func (p *pacer) send(now int64) int64 {
	if p.remaining >= 0 && p.resetAt <= now {
		p.remaining = -1
	}
	slot := max(now, p.blockedUntil)
	if p.remaining >= 0 && slot < p.resetAt {
		if p.remaining == 0 {
			slot = p.resetAt
		} else {
			if (p.limit < 0 || 2*p.remaining <= p.limit) && p.last != math.MinInt64 {
				base := min(p.resetAt, max(now, p.last))
				slot = min(p.resetAt, max(slot, p.last+(p.resetAt-base)/p.remaining))
			}
			p.remaining--
		}
	}
	p.last = slot
	p.inFlight++
	return slot - now
}

func (p *pacer) response(now int64, said signals, random float64) {
	p.failed()
	if said.wait > 0 {
		jitter := int64(math.Floor(random * float64(said.wait/10)))
		p.blockedUntil = max(p.blockedUntil, now+said.wait+jitter)
	}
	if said.remaining >= 0 && said.reset >= 0 {
		p.remaining, p.limit, p.resetAt = max(0, said.remaining-p.inFlight), said.limit, now+said.reset
	}
}

func (p *pacer) failed() { p.inFlight = max(0, p.inFlight-1) }

// retryBudget lets retries be at most a tenth of the requests, and ten at once.
type retryBudget struct{ balance int64 }

func newRetryBudget() *retryBudget { return &retryBudget{budgetMax} }

func (b *retryBudget) request() { b.balance = min(budgetMax, b.balance+budgetDeposit) }

func (b *retryBudget) retry() bool {
	if b.balance < budgetPrice {
		return false
	}
	b.balance -= budgetPrice
	return true
}

// adaptiveThrottle rejects locally while most requests are refused ("Handling overload" in Google's SRE book).
type adaptiveThrottle struct {
	buckets           []throttleBucket
	requests, accepts int64
}

type throttleBucket struct{ second, requests, accepts int64 }

func (t *adaptiveThrottle) request(now int64) {
	t.bucket(now).requests++
	t.requests++
}

func (t *adaptiveThrottle) accept(now int64) {
	t.bucket(now).accepts++
	t.accepts++
}

func (t *adaptiveThrottle) probability(now int64) float64 {
	t.expire(now)
	return max(0, float64(t.requests-throttleK*t.accepts)/float64(t.requests+1))
}

func (t *adaptiveThrottle) bucket(now int64) *throttleBucket {
	t.expire(now)
	second := now / 1000
	if len(t.buckets) == 0 || t.buckets[len(t.buckets)-1].second < second {
		t.buckets = append(t.buckets, throttleBucket{second: second})
	}
	return &t.buckets[len(t.buckets)-1]
}

func (t *adaptiveThrottle) expire(now int64) {
	oldest, gone := now/1000-throttleBuckets, 0
	for gone < len(t.buckets) && t.buckets[gone].second <= oldest {
		t.requests -= t.buckets[gone].requests
		t.accepts -= t.buckets[gone].accepts
		gone++
	}
	t.buckets = t.buckets[gone:]
}
