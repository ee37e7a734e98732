package tollgate

import (
	"math/bits"
	"sync/atomic"
	"time"
)

const (
	// Latencies are counted in this unit, rounded up.
	latencyUnit = 125 * time.Microsecond
	// 1 ms or less, then eight buckets for each doubling, to 16.384 s and more.
	latencyBuckets = 1 + 8*14
	// Requests between two estimates, and before the first.
	estimateEvery = 100
	// When an estimate finds this many, it halves all counts.
	halveAt = 1_000
)

// latencyP95 estimates the 95th percentile of the latency of recent first requests, after which a call is hedged. It is a
// histogram whose counts are halved from time to time, with integers only, so that it is the same in every language.
// Recording takes no lock; two updates at once may halve the counts once too often, which forgets a little sooner.
type latencyP95 struct {
	counts   [latencyBuckets]atomic.Uint32
	recorded atomic.Uint32
	// estimate is the bucket whose upper edge is the estimate.
	estimate atomic.Uint32
}

func newLatencyP95() *latencyP95 {
	p := &latencyP95{}
	p.estimate.Store(uint32(latencyBucket(hedgeAfterDefault)))
	return p
}

func latencyBucket(latency time.Duration) int {
	// Microseconds, as in the other languages.
	above := (latency.Truncate(time.Microsecond)+latencyUnit-1)/latencyUnit - 1
	if above < 8 {
		return 0
	}
	doublings := bits.Len64(uint64(above)) - 4
	return min(latencyBuckets-1, 8*doublings+int(above>>doublings)-7)
}

// latencyEdge returns the longest latency of a bucket.
func latencyEdge(bucket int) time.Duration {
	if bucket == 0 {
		return time.Millisecond
	}
	return latencyUnit * time.Duration(((bucket-1)%8+9)<<((bucket-1)/8))
}

// get returns the estimate.
func (p *latencyP95) get() time.Duration { return latencyEdge(int(p.estimate.Load())) }

// record records how long a first request took. A fault that came sooner than the estimate says nothing about answers.
func (p *latencyP95) record(latency time.Duration, isFault bool) {
	bucket := latencyBucket(latency)
	if isFault && bucket < int(p.estimate.Load()) {
		return
	}
	p.counts[bucket].Add(1)
	if p.recorded.Add(1)%estimateEvery == 0 {
		p.update()
	}
}

func (p *latencyP95) update() {
	var counts [latencyBuckets]uint64
	total, below := uint64(0), uint64(0)
	for at := range p.counts {
		counts[at] = uint64(p.counts[at].Load())
		total += counts[at]
	}
	for at, count := range counts {
		if below += count; below*100 >= total*95 {
			p.estimate.Store(uint32(at))
			break
		}
	}
	if total < halveAt {
		return
	}
	for at := range p.counts {
		for count := p.counts[at].Load(); !p.counts[at].CompareAndSwap(count, count/2); {
			count = p.counts[at].Load()
		}
	}
}
