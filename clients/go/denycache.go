package tollgate

import (
	"container/list"
	"sync"
	"time"
)

// maxCacheKey is the longest key that is stored, in bytes: callers choose what is in it.
const maxCacheKey = 4_096

// denyCache answers denials that are still in force without asking a server, until their exact end. It is bounded: the
// entry stored longest ago makes room.
type denyCache struct {
	lock    sync.Mutex
	max     int
	entries map[string]*list.Element
	order   *list.List
}

type deniedEntry struct {
	key           string
	at, end, cost int64
	result        Result
}

func newDenyCache(maxEntries int) *denyCache {
	return &denyCache{max: maxEntries, entries: map[string]*list.Element{}, order: list.New()}
}

func (c *denyCache) lookup(key string, cost, now int64) (Result, bool) {
	c.lock.Lock()
	defer c.lock.Unlock()
	element, ok := c.entries[key]
	if !ok {
		return Result{}, false
	}
	entry := element.Value.(*deniedEntry)
	if now >= entry.end {
		c.drop(element)
		return Result{}, false
	}
	if cost < entry.cost || cost == 0 {
		return Result{}, false
	}
	result, elapsed := entry.result, time.Duration(now-entry.at)*time.Millisecond
	result.Source, result.Reason, result.reservation = "cache", "denied", ""
	result.RetryAfter = max(0, result.RetryAfter-elapsed)
	if result.ResetAfter >= 0 {
		result.ResetAfter = max(0, result.ResetAfter-elapsed)
	}
	return result, true
}

func (c *denyCache) store(key string, cost int64, result Result, at int64) {
	if c.max <= 0 || !result.cacheable || result.RetryAfter <= 0 || cost == 0 {
		return
	}
	c.lock.Lock()
	defer c.lock.Unlock()
	if element, ok := c.entries[key]; ok {
		c.drop(element)
	}
	for c.order.Len() >= c.max {
		c.drop(c.order.Front())
	}
	end := at + min(result.RetryAfter.Milliseconds(), denyCacheAgeMs)
	c.entries[key] = c.order.PushBack(&deniedEntry{key, at, end, cost, result})
}

func (c *denyCache) clear(key string) {
	c.lock.Lock()
	defer c.lock.Unlock()
	if element, ok := c.entries[key]; ok {
		c.drop(element)
	}
}

func (c *denyCache) clearAll() {
	c.lock.Lock()
	defer c.lock.Unlock()
	clear(c.entries)
	c.order.Init()
}

func (c *denyCache) drop(element *list.Element) {
	delete(c.entries, element.Value.(*deniedEntry).key)
	c.order.Remove(element)
}
