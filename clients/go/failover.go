package tollgate

import (
	"slices"
	"sync"
	"time"
)

const (
	cooldownMs     = 1_000
	maxCooldownMs  = 30_000
	denyCacheSize  = 10_000
	denyCacheAgeMs = 300_000
	// When a call is hedged until enough is measured.
	hedgeAfterDefault = 3 * time.Millisecond
)

// deadlineOf returns the time for all attempts: never past the caller's own deadline, which may be noDeadline.
func deadlineOf(own, caller int64) int64 { return max(0, min(own, caller)) }

// attemptTime returns the time for one attempt; false if nothing is left of the deadline.
func attemptTime(deadline, elapsed int64, serversLeft int) (int64, bool) {
	if elapsed >= deadline {
		return 0, false
	}
	return max(1, (deadline-elapsed)/int64(serversLeft)), true
}

// failover is the order of the servers: one that failed goes behind the others for a while, longer each time.
type failover struct {
	lock   sync.Mutex
	faults []int
	until  []int64
}

func newFailover(servers int) *failover {
	return &failover{faults: make([]int, servers), until: make([]int64, servers)}
}

func (f *failover) order(now int64) []int {
	f.lock.Lock()
	defer f.lock.Unlock()
	order := make([]int, len(f.until))
	for at := range order {
		order[at] = at
	}
	back := func(server int) int64 {
		if f.until[server] > now {
			return f.until[server]
		}
		return 0
	}
	slices.SortStableFunc(order, func(a, b int) int {
		switch {
		case back(a) < back(b):
			return -1
		case back(a) > back(b):
			return 1
		}
		return 0
	})
	return order
}

func (f *failover) fault(server int, now int64) {
	f.lock.Lock()
	defer f.lock.Unlock()
	f.faults[server]++
	f.until[server] = now + min(maxCooldownMs, int64(cooldownMs)<<min(f.faults[server]-1, 16))
}

func (f *failover) answer(server int) {
	f.lock.Lock()
	defer f.lock.Unlock()
	f.faults[server], f.until[server] = 0, 0
}

// hedgeBudget bounds the hedges of one client, as a retry budget does: a second request for each call would make slow
// servers slower.
type hedgeBudget struct {
	lock   sync.Mutex
	budget retryBudget
}

func newHedgeBudget() *hedgeBudget { return &hedgeBudget{budget: *newRetryBudget()} }

func (b *hedgeBudget) call() {
	b.lock.Lock()
	defer b.lock.Unlock()
	b.budget.request()
}

func (b *hedgeBudget) hedge() bool {
	b.lock.Lock()
	defer b.lock.Unlock()
	return b.budget.retry()
}

// verdict is what an answer means for the other requests of its call.
type verdict int

const (
	verdictAllowed verdict = iota
	// A limit has no room, perhaps because of another request of the same call.
	verdictDenied
	// Not allowed for another reason: shed, rejected, or a rule's fail policy.
	verdictFailed
)

func verdictOf(result Result) verdict {
	switch {
	case result.Allowed:
		return verdictAllowed
	case result.Reason == "denied":
		return verdictDenied
	}
	return verdictFailed
}

// hedge is one hedged request without I/O: it says which servers to ask, and which answer decides. A denial waits for
// the request beside it: on one store, the charge of that one may be the reason.
type hedge struct {
	servers  []int
	next     int
	underWay int
	winner   int
	// denied is the server of a denial that waits; -1 if there is none.
	denied int
	// isUnconfirmed tells that a request beside the winner has not answered: its charge may be the reason of the denial.
	isUnconfirmed bool
	// last is the server asked last, timedOut one that has used its share of the deadline: a fault, although its answer
	// still counts. -1 if there is none.
	last, timedOut int
	// askNext is when timer is due, since the start; negative if no further server is asked for being slow.
	askNext time.Duration
	// share is when failover asks the next server, whatever the budget: after the first one's share of the deadline.
	share time.Duration
	// budget is nil for a reservation that is not hedged.
	budget *hedgeBudget
}

func newHedge(order []int, askNext, share time.Duration, budget *hedgeBudget) *hedge {
	return &hedge{servers: order, winner: -1, denied: -1, last: -1, timedOut: -1, askNext: min(askNext, share), share: share, budget: budget}
}

// start returns the first server to ask.
func (h *hedge) start() (int, bool) {
	if h.budget != nil {
		h.budget.call()
	}
	return h.send()
}

// send returns the next server to ask; false if there is none, or two are under way.
func (h *hedge) send() (int, bool) {
	if !h.hasNext() {
		return 0, false
	}
	h.last = h.servers[h.next]
	h.next++
	h.underWay++
	return h.last, true
}

func (h *hedge) hasNext() bool { return h.winner < 0 && h.next < len(h.servers) && h.underWay < 2 }

// timer returns the server to ask because the first one has not answered in time.
func (h *hedge) timer() (int, bool) {
	isHedge := h.budget != nil && h.askNext < h.share
	h.askNext = -1
	if isHedge && h.hasNext() && !h.budget.hedge() {
		h.askNext = h.share
		return 0, false
	}
	if !isHedge && h.hasNext() {
		h.timedOut = h.last
	}
	return h.send()
}

// fault records a fault, and returns the next server to ask.
func (h *hedge) fault() (int, bool) {
	h.underWay--
	h.end()
	return h.send()
}

// answer records an answer.
func (h *hedge) answer(server int, what verdict) {
	h.underWay--
	switch {
	case h.denied >= 0 && what != verdictAllowed:
		h.winner = h.denied
	case h.denied < 0 && what == verdictDenied && h.underWay > 0:
		h.denied = server
	default:
		h.winner = server
	}
}

// end makes a denial that waits the answer.
func (h *hedge) end() {
	if h.denied >= 0 {
		h.winner, h.isUnconfirmed = h.denied, true
	}
}

func (h *hedge) isOver() bool { return h.winner >= 0 || h.underWay == 0 }
