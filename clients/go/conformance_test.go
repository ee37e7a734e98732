package tollgate

import (
	"bytes"
	"container/heap"
	"context"
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"reflect"
	"testing"
	"time"
)

// load reads one file of the suite that the clients of all languages share.
func load(t *testing.T, name string, into any) {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("..", "conformance", name+".json"))
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(text, into); err != nil {
		t.Fatal(err)
	}
}

// optional returns a number, or -1 for null.
func optional(number *int64) int64 {
	if number == nil {
		return -1
	}
	return *number
}

func same(t *testing.T, name string, got, want any) {
	t.Helper()
	if !reflect.DeepEqual(got, want) {
		t.Errorf("%s: got %+v, want %+v", name, got, want)
	}
}

type jsonSignals struct {
	Refused   bool   `json:"refused"`
	WaitMs    *int64 `json:"wait_ms"`
	Limit     *int64 `json:"limit"`
	Remaining *int64 `json:"remaining"`
	ResetMs   *int64 `json:"reset_ms"`
}

func (s jsonSignals) signals() signals {
	return signals{s.Refused, optional(s.WaitMs), optional(s.Limit), optional(s.Remaining), optional(s.ResetMs)}
}

func TestHeaders(t *testing.T) {
	var document struct {
		MaxWaitMs int64 `json:"max_wait_ms"`
		Cases     []struct {
			Name    string
			Status  int
			NowMs   int64 `json:"now_ms"`
			Headers [][2]string
			Expect  jsonSignals
		}
	}
	load(t, "headers", &document)
	same(t, "max_wait_ms", int64(maxWaitMs), document.MaxWaitMs)
	if len(document.Cases) == 0 {
		t.Fatal("no cases")
	}
	for _, each := range document.Cases {
		same(t, each.Name, readSignals(each.Status, each.Headers, each.NowMs), each.Expect.signals())
	}
}

func TestAnswers(t *testing.T) {
	type answerCase struct {
		Name   string
		Status int
		Body   string
		Pad    int `json:"pad_with_spaces_to_bytes"`
		Fault  *string
		// Response is what the denying rule has callers answered with.
		Response *struct {
			Status      int
			Body        string
			ContentType string `json:"content_type"`
		}
		Result *struct {
			Allowed          bool
			Source, Reason   string
			Origin, Rule     *string
			Limit, Remaining *int64
			ResetMs          *int64  `json:"reset_ms"`
			RetryAfterMs     *int64  `json:"retry_after_ms"`
			DelayMs          int64   `json:"delay_ms"`
			DecisionID       *string `json:"decision_id"`
			Reservation      *string
			Cacheable, Shed  bool
			Ended            *string
			Cost             *int64
		}
	}
	var document struct {
		MaxBody int `json:"max_body_bytes"`
		Check   []answerCase
	}
	load(t, "answers", &document)
	same(t, "max_body_bytes", maxBody, document.MaxBody)
	or := func(value *string) string {
		if value == nil {
			return ""
		}
		return *value
	}
	body := func(each answerCase) []byte {
		return append([]byte(each.Body), bytes.Repeat([]byte(" "), max(0, each.Pad-len(each.Body)))...)
	}
	for _, each := range document.Check {
		result, err := decodeCheck(each.Status, body(each))
		if each.Fault != nil {
			same(t, each.Name, err, error(fault(*each.Fault)))
			continue
		}
		want := each.Result
		same(t, each.Name, err, error(nil))
		var response *RuleResponse
		if own := each.Response; own != nil {
			response = &RuleResponse{Status: own.Status, Body: []byte(own.Body), ContentType: own.ContentType}
		}
		same(t, each.Name, result.result, Result{
			want.Allowed, want.Source, want.Reason, or(want.Origin), want.Shed, or(want.Rule), optional(want.Limit),
			optional(want.Remaining), millis(optional(want.ResetMs)), millis(optional(want.RetryAfterMs)),
			millis(want.DelayMs), or(want.DecisionID), response, or(want.Reservation), want.Cacheable,
		})
	}
	var ends struct {
		Cases []struct {
			Name, Body string
			Status     int
			Fault      *string
			Result     struct {
				Ended, Reason *string
				Cost          *int64
			}
		} `json:"settle_and_cancel"`
	}
	load(t, "answers", &ends)
	for _, each := range ends.Cases {
		ended, err := decodeEnded(each.Status, []byte(each.Body))
		if each.Fault != nil {
			same(t, each.Name, err, error(fault(*each.Fault)))
			continue
		}
		same(t, each.Name, err, error(nil))
		same(t, each.Name, ended, Ended{or(each.Result.Ended), max(0, optional(each.Result.Cost)), or(each.Result.Reason)})
	}
}

func TestRequestHeads(t *testing.T) {
	var document struct {
		Bodies []struct {
			Name string
			Head struct {
				Method, Target, Peer string
				Headers              [][2]string
			}
			Attributes map[string]string
			Cost       *int64
			Expect     any
		}
		Answers []struct {
			Name, Body string
			Status     int
			Fault      *string
			Result     struct {
				Allowed        bool
				Reason, Source string
				ProblemStatus  *int64 `json:"problem_status"`
			}
		}
	}
	load(t, "heads", &document)
	// The suite writes each byte as a character.
	raw := func(text string) string {
		var bytes []byte
		for _, each := range text {
			bytes = append(bytes, byte(each))
		}
		return string(bytes)
	}
	for _, each := range document.Bodies {
		var body []byte
		server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, request *http.Request) {
			body, _ = io.ReadAll(request.Body)
			w.WriteHeader(http.StatusBadRequest)
		}))
		client, err := New("shop", Options{Servers: []string{server.URL}, Timeout: 5 * time.Second})
		if err != nil {
			t.Fatal(err)
		}
		head := Head{Method: each.Head.Method, Path: raw(each.Head.Target), Peer: each.Head.Peer}
		for _, field := range each.Head.Headers {
			head.Fields = append(head.Fields, [2]string{raw(field[0]), raw(field[1])})
		}
		cost := int64(1)
		if each.Cost != nil {
			cost = *each.Cost
		}
		client.LimitN(context.Background(), Request(head, each.Attributes), cost)
		server.Close()
		var got any
		if err := json.Unmarshal(body, &got); err != nil {
			t.Fatal(err)
		}
		same(t, each.Name, got, each.Expect)
	}
	for _, each := range document.Answers {
		found, err := decodeCheck(each.Status, []byte(each.Body))
		if each.Fault != nil {
			same(t, each.Name, err, error(fault(*each.Fault)))
			continue
		}
		same(t, each.Name, err, error(nil))
		want, result := each.Result, found.result
		same(t, each.Name, []any{result.Allowed, result.Reason, result.Source}, []any{want.Allowed, want.Reason, want.Source})
		admission := Admission{Header: http.Header{}}
		admission.reject(found.problem)
		status := max(400, optional(want.ProblemStatus))
		same(t, each.Name, int64(admission.Status), status)
		if want.ProblemStatus != nil && int(*want.ProblemStatus) == each.Status {
			same(t, each.Name, string(admission.Body), each.Body)
		}
	}
}

func TestFailover(t *testing.T) {
	var document struct {
		Cooldown    int64 `json:"cooldown_ms"`
		MaxCooldown int64 `json:"max_cooldown_ms"`
		Deadlines   []struct {
			Own    int64  `json:"own_ms"`
			Caller *int64 `json:"caller_ms"`
			Expect struct {
				Deadline int64 `json:"deadline_ms"`
			}
		}
		Attempts []struct {
			Deadline int64 `json:"deadline_ms"`
			Elapsed  int64 `json:"elapsed_ms"`
			Left     int   `json:"servers_left"`
			Expect   struct {
				Attempt *int64 `json:"attempt_ms"`
			}
		}
		Sequences []struct {
			Name    string
			Servers int
			Steps   []struct {
				At     int64 `json:"at_ms"`
				Event  string
				Server int
				Expect []int
			}
		}
	}
	load(t, "failover", &document)
	same(t, "constants", [2]int64{document.Cooldown, document.MaxCooldown}, [2]int64{cooldownMs, maxCooldownMs})
	for _, each := range document.Deadlines {
		caller := int64(noDeadline)
		if each.Caller != nil {
			caller = *each.Caller
		}
		same(t, "deadline", deadlineOf(each.Own, caller), each.Expect.Deadline)
	}
	for _, each := range document.Attempts {
		attempt, ok := attemptTime(each.Deadline, each.Elapsed, each.Left)
		if !ok {
			attempt = -1
		}
		same(t, "attempt", attempt, optional(each.Expect.Attempt))
	}
	for _, each := range document.Sequences {
		order := newFailover(each.Servers)
		for _, step := range each.Steps {
			switch step.Event {
			case "fault":
				order.fault(step.Server, step.At)
			case "ok":
				order.answer(step.Server)
			default:
				same(t, each.Name, order.order(step.At), step.Expect)
			}
		}
	}
}

type hedgeEvent struct {
	at     int64
	server int
}
type hedgeEvents []hedgeEvent

func (e hedgeEvents) Len() int { return len(e) }
func (e hedgeEvents) Less(a, b int) bool {
	return e[a].at < e[b].at || e[a].at == e[b].at && e[a].server < e[b].server
}
func (e hedgeEvents) Swap(a, b int) { e[a], e[b] = e[b], e[a] }
func (e *hedgeEvents) Push(x any)   { *e = append(*e, x.(hedgeEvent)) }
func (e *hedgeEvents) Pop() any {
	last := (*e)[len(*e)-1]
	*e = (*e)[:len(*e)-1]
	return last
}

func TestHedging(t *testing.T) {
	var document struct {
		After int64 `json:"default_hedge_after_ms"`
		Cases []struct {
			Name     string
			After    int64 `json:"hedge_after_ms"`
			Deadline int64 `json:"deadline_ms"`
			Budget   int64
			Servers  []struct {
				After       int64 `json:"after_ms"`
				Answer      string
				Reservation string
			}
			Expect struct {
				Sent      [][2]int64
				Winner    *int64
				At        int64 `json:"at_ms"`
				Canceled  [][2]any
				Cacheable bool
				TimedOut  []int `json:"timed_out"`
				Budget    int64
			}
		}
	}
	load(t, "hedging", &document)
	same(t, "default", hedgeAfterDefault.Milliseconds(), document.After)
	for _, each := range document.Cases {
		order := make([]int, len(each.Servers))
		for at := range order {
			order[at] = at
		}
		budget, verdicts := &hedgeBudget{budget: retryBudget{each.Budget}}, map[string]verdict{"allowed": verdictAllowed, "denied": verdictDenied}
		state, events := newHedge(order, millis(each.After), millis(each.Deadline/int64(len(order))), budget), &hedgeEvents{}
		timer, end := len(order), len(order)+1
		sent, canceled, endedAt := [][2]int64{}, [][2]any{}, int64(-1)
		send := func(server int, ok bool, now int64) {
			if ok {
				sent = append(sent, [2]int64{int64(server), now})
				heap.Push(events, hedgeEvent{now + each.Servers[server].After, server})
			}
		}
		first, ok := state.start()
		send(first, ok, 0)
		heap.Push(events, hedgeEvent{state.askNext.Milliseconds(), timer})
		heap.Push(events, hedgeEvent{each.Deadline, end})
		for events.Len() > 0 {
			event := heap.Pop(events).(hedgeEvent)
			switch {
			case endedAt >= 0:
				if event.server < timer && each.Servers[event.server].Reservation != "" {
					canceled = append(canceled, [2]any{float64(event.server), each.Servers[event.server].Reservation})
				}
				continue
			case event.server == end:
				state.end()
				endedAt = event.at
			case event.server == timer:
				next, ok := state.timer()
				send(next, ok, event.at)
				if state.askNext >= 0 {
					heap.Push(events, hedgeEvent{state.askNext.Milliseconds(), timer})
				}
			case each.Servers[event.server].Answer == "fault":
				next, ok := state.fault()
				send(next, ok, event.at)
			default:
				what, ok := verdicts[each.Servers[event.server].Answer]
				if !ok {
					what = verdictFailed
				}
				state.answer(event.server, what)
			}
			if state.isOver() {
				endedAt = event.at
			}
		}
		isCacheable := state.winner >= 0 && each.Servers[state.winner].Answer == "denied" && !state.isUnconfirmed
		same(t, each.Name, isCacheable, each.Expect.Cacheable)
		same(t, each.Name, budget.budget.balance, each.Expect.Budget)
		timedOut := []int{}
		if state.timedOut >= 0 {
			timedOut = append(timedOut, state.timedOut)
		}
		same(t, each.Name, timedOut, each.Expect.TimedOut)
		same(t, each.Name, sent, each.Expect.Sent)
		same(t, each.Name, int64(state.winner), optional(each.Expect.Winner))
		same(t, each.Name, endedAt, each.Expect.At)
		same(t, each.Name, canceled, each.Expect.Canceled)
	}
}

func TestHedgeAfter(t *testing.T) {
	var document struct {
		Default int64 `json:"default_hedge_after_us"`
		Cases   []struct {
			Name  string
			Steps []struct {
				Latencies []int64 `json:"latencies_us"`
				Times     int
				Fault     bool
				Expect    struct {
					After int64 `json:"hedge_after_us"`
				}
			}
		}
	}
	load(t, "hedge-after", &document)
	same(t, "default", hedgeAfterDefault.Microseconds(), document.Default)
	for _, each := range document.Cases {
		latency := newLatencyP95()
		for _, step := range each.Steps {
			for range step.Times {
				for _, micros := range step.Latencies {
					latency.record(time.Duration(micros)*time.Microsecond, step.Fault)
				}
			}
			same(t, each.Name, latency.get().Microseconds(), step.Expect.After)
		}
	}
}

func TestDenyCache(t *testing.T) {
	var document struct {
		Max       int   `json:"default_max_entries"`
		Age       int64 `json:"max_age_ms"`
		Sequences []struct {
			Name  string
			Max   int `json:"max_entries"`
			Steps []struct {
				At         int64 `json:"at_ms"`
				Event, Key string
				Cost       int64
				RetryAfter int64 `json:"retry_after_ms"`
				Reset      int64 `json:"reset_ms"`
				Entries    int
				Expect     *struct {
					RetryAfter int64 `json:"retry_after_ms"`
					Reset      int64 `json:"reset_ms"`
				}
			}
		}
	}
	load(t, "deny-cache", &document)
	same(t, "constants", [2]int64{int64(document.Max), document.Age}, [2]int64{denyCacheSize, denyCacheAgeMs})
	for _, each := range document.Sequences {
		cache := newDenyCache(each.Max)
		for _, step := range each.Steps {
			switch step.Event {
			case "denied":
				denial := Result{cacheable: true, RetryAfter: millis(step.RetryAfter), ResetAfter: millis(step.Reset)}
				cache.store(step.Key, step.Cost, denial, step.At)
			case "clear":
				if step.Key == "" {
					cache.clearAll()
				} else {
					cache.clear(step.Key)
				}
			default:
				hit, ok := cache.lookup(step.Key, step.Cost, step.At)
				same(t, each.Name, ok, step.Expect != nil)
				if ok && step.Expect != nil {
					same(t, each.Name, [2]time.Duration{hit.RetryAfter, hit.ResetAfter},
						[2]time.Duration{millis(step.Expect.RetryAfter), millis(step.Expect.Reset)})
					same(t, each.Name, [2]string{hit.Source, hit.Reason}, [2]string{"cache", "denied"})
				}
				same(t, each.Name, cache.order.Len(), step.Entries)
			}
		}
	}
}

func TestPacing(t *testing.T) {
	var document struct {
		Cases []struct {
			Limit     *int64
			Remaining int64
			Reset     int64 `json:"reset_ms"`
			Since     int64 `json:"since_last_ms"`
			Expect    struct {
				Delay int64 `json:"delay_ms"`
			}
		}
		Sequences []struct {
			Name  string
			Steps []struct {
				At      int64 `json:"at_ms"`
				Event   string
				Signals jsonSignals
				Random  float64
				Expect  *struct {
					Delay   int64 `json:"delay_ms"`
					Blocked int64 `json:"blocked_until_ms"`
				}
			}
		}
	}
	load(t, "pacing", &document)
	for _, each := range document.Cases {
		same(t, "pacing", paceMs(optional(each.Limit), each.Remaining, each.Reset, each.Since), each.Expect.Delay)
	}
	for _, each := range document.Sequences {
		state := newPacer()
		for _, step := range each.Steps {
			switch step.Event {
			case "send":
				same(t, each.Name, state.send(step.At), step.Expect.Delay)
			case "failed":
				state.failed()
			default:
				state.response(step.At, step.Signals.signals(), step.Random)
				if step.Expect != nil {
					same(t, each.Name, state.blockedUntil, step.Expect.Blocked)
				}
			}
		}
	}
}

func TestRetries(t *testing.T) {
	var backoffs struct {
		Cases []struct {
			Attempt int
			Random  float64
			Wait    *int64 `json:"wait_ms"`
			Expect  struct {
				Bound int64 `json:"bound_ms"`
				Delay int64 `json:"delay_ms"`
			}
		}
	}
	load(t, "backoff", &backoffs)
	for _, each := range backoffs.Cases {
		same(t, "bound", backoffBound(each.Attempt), each.Expect.Bound)
		same(t, "delay", backoffMs(each.Attempt, each.Random, optional(each.Wait)), each.Expect.Delay)
	}
	var budgets struct {
		Sequences []struct {
			Name  string
			Steps []struct {
				Event   string
				Granted bool
				Balance int64
			}
		}
	}
	load(t, "retry-budget", &budgets)
	for _, each := range budgets.Sequences {
		budget := newRetryBudget()
		for _, step := range each.Steps {
			if step.Event == "retry" {
				same(t, each.Name, budget.retry(), step.Granted)
			} else {
				budget.request()
			}
			same(t, each.Name, budget.balance, step.Balance)
		}
	}
}

func TestAdaptiveThrottling(t *testing.T) {
	var document struct {
		K         int64
		Sequences []struct {
			Name  string
			Steps []struct {
				At                int64 `json:"at_ms"`
				Event             string
				Times             int
				Requests, Accepts int64
				Expect            float64
				Random            *float64
				Rejected          bool
			}
		}
	}
	load(t, "adaptive-throttling", &document)
	same(t, "k", document.K, int64(throttleK))
	for _, each := range document.Sequences {
		var throttle adaptiveThrottle
		for _, step := range each.Steps {
			switch step.Event {
			case "request":
				for range max(1, step.Times) {
					throttle.request(step.At)
				}
			case "accept":
				for range max(1, step.Times) {
					throttle.accept(step.At)
				}
			default:
				probability := throttle.probability(step.At)
				same(t, each.Name, [2]int64{throttle.requests, throttle.accepts}, [2]int64{step.Requests, step.Accepts})
				same(t, each.Name, probability, step.Expect)
				if step.Random != nil {
					same(t, each.Name, *step.Random < probability, step.Rejected)
				}
			}
		}
	}
}
