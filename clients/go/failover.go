package tollgate

import (
	"slices"
	"sync"
)

const (
	cooldownMs     = 1_000
	maxCooldownMs  = 30_000
	hedgeAfterMs   = 3
	denyCacheSize  = 10_000
	denyCacheAgeMs = 300_000
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

// hedge is one hedged request without I/O: it says which servers to ask, and which answer decides.
type hedge struct {
	servers  []int
	next     int
	underWay int
	winner   int
}

func newHedge(order []int) *hedge { return &hedge{servers: order, winner: -1} }

// send returns the next server to ask; false if there is none, or two are under way.
func (h *hedge) send() (int, bool) {
	if h.winner >= 0 || h.next >= len(h.servers) || h.underWay >= 2 {
		return 0, false
	}
	h.next++
	h.underWay++
	return h.servers[h.next-1], true
}

// timer returns the server to ask because the first one has not answered in time.
func (h *hedge) timer() (int, bool) {
	if h.underWay != 1 {
		return 0, false
	}
	return h.send()
}

// fault records a fault, and returns the next server to ask.
func (h *hedge) fault() (int, bool) {
	h.underWay--
	return h.send()
}

// answer records an answer, and returns whether it decides the request.
func (h *hedge) answer(server int) bool {
	h.underWay--
	if h.winner >= 0 {
		return false
	}
	h.winner = server
	return true
}

func (h *hedge) isOver() bool { return h.winner < 0 && h.underWay == 0 }
