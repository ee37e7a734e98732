package tollgate

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

const rules = `
domain: test
descriptors:
  - {key: user, name: per-user, limit: 3/hour, algorithm: fixed_window}
  - {key: fast, name: fast, limit: 2/second}
  - {key: api_key, name: per-key, limit: 1000000/hour}
`

func freeAddress(t testing.TB) string {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	return listener.Addr().String()
}

// startServer starts a real Tollgate, and returns its URL.
func startServer(t testing.TB) string { return startServerWith(t, rules) }

func startServerWith(t testing.TB, rules string) string {
	t.Helper()
	binary := os.Getenv("TOLLGATE_BINARY")
	if binary == "" {
		t.Fatal("set TOLLGATE_BINARY to a tollgate binary, or run `make clients-go-test`")
	}
	path := filepath.Join(t.TempDir(), "rules.yaml")
	if err := os.WriteFile(path, []byte(rules), 0o600); err != nil {
		t.Fatal(err)
	}
	// Another process may have taken the port since.
	for range 5 {
		if address, ok := tryServer(t, binary, path); ok {
			return "http://" + address
		}
	}
	t.Fatal("the server does not start")
	return ""
}

// tryServer starts a server and returns whether it is ready.
func tryServer(t testing.TB, binary, path string) (string, bool) {
	t.Helper()
	address := freeAddress(t)
	command := exec.Command(binary, "serve", "--rules", path, "--http", address, "--grpc", freeAddress(t),
		"--admin", freeAddress(t), "--resp", freeAddress(t))
	command.Dir = filepath.Dir(path)
	if err := command.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan struct{})
	go func() {
		_ = command.Wait()
		close(ended)
	}()
	t.Cleanup(func() {
		_ = command.Process.Kill()
		<-ended
	})
	for end := time.Now().Add(time.Minute); time.Now().Before(end); {
		response, err := http.Get("http://" + address + "/readyz")
		if err == nil {
			response.Body.Close()
		}
		select {
		case <-ended:
			return "", false
		case <-time.After(20 * time.Millisecond):
			if err == nil && response.StatusCode == http.StatusOK {
				return address, true
			}
		}
	}
	return "", false
}

func newClient(t *testing.T, options Options) *Client {
	t.Helper()
	if options.Timeout == 0 {
		options.Timeout = 5 * time.Second
	}
	client, err := New("test", options)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(client.Close)
	return client
}

func user(name string) Subject { return Attributes(map[string]string{"user": name}) }

func TestClient(t *testing.T) {
	url := startServer(t)
	ctx := context.Background()
	client := newClient(t, Options{Servers: []string{url}})

	t.Run("limits as the rules say", func(t *testing.T) {
		var allowed []bool
		var last Result
		for range 4 {
			last = client.Limit(ctx, user("a"))
			allowed = append(allowed, last.Allowed)
		}
		same(t, "allowed", allowed, []bool{true, true, true, false})
		same(t, "denial", []string{last.Source, last.Reason, last.Rule}, []string{"server", "denied", "per-user"})
		if last.Limit != 3 || last.RetryAfter <= 0 || last.RetryAfter > time.Hour || len(last.DecisionID) != 32 {
			t.Errorf("%+v", last)
		}
		same(t, "cached", client.Limit(ctx, user("a")).Source, "cache")
		same(t, "peeks", client.Peek(ctx, user("a")).Source, "server")
		client.ClearDenyCache()
		same(t, "asked again", client.Limit(ctx, user("a")).Source, "server")
		same(t, "key", client.Limit(ctx, Key("k")).Rule, "per-key")
		same(t, "descriptor", client.Limit(ctx, Descriptors(Descriptor{{"user", "d"}})).Rule, "per-user")
	})

	t.Run("reservations are settled and canceled", func(t *testing.T) {
		first := client.Reserve(ctx, user("b"), ReserveOptions{Cost: 3})
		same(t, "reserved", first.OK(), true)
		same(t, "denied", client.Reserve(ctx, user("b"), ReserveOptions{}).OK(), false)
		same(t, "settled", first.Settle(ctx, 1), Ended{Outcome: "settled", Cost: 1})
		second := client.Reserve(ctx, user("b"), ReserveOptions{Cost: 2})
		same(t, "reserved", second.OK(), true)
		same(t, "canceled", second.Cancel(ctx), Ended{Outcome: "canceled"})
		same(t, "remaining", client.Peek(ctx, user("b")).Remaining, int64(2))
		same(t, "conflict", first.Settle(ctx, 2).Reason, "conflict")
	})

	t.Run("batches keep their order", func(t *testing.T) {
		results := client.LimitBatch(ctx, []Subject{user("c"), Key("k"), user("c")})
		same(t, "rules", []string{results[0].Rule, results[1].Rule, results[2].Rule}, []string{"per-user", "per-key", "per-user"})
	})

	t.Run("the shape of x/time/rate", func(t *testing.T) {
		limiter := client.Limiter(Attributes(map[string]string{"fast": "x"}))
		for range 4 {
			if err := limiter.Wait(ctx); err != nil {
				t.Fatal(err)
			}
		}
		if limiter.AllowN(100) || limiter.WaitN(ctx, 100) == nil {
			t.Error("more than the limit was allowed")
		}
		short, cancel := context.WithTimeout(ctx, time.Millisecond)
		defer cancel()
		for limiter.Allow() {
		}
		if limiter.Wait(short) == nil {
			t.Error("it waited beyond the deadline")
		}
	})

	t.Run("many goroutines", func(t *testing.T) {
		var allowed atomic.Int64
		var group sync.WaitGroup
		for range 16 {
			group.Add(1)
			go func() {
				defer group.Done()
				if client.Limit(ctx, user("e")).Allowed {
					allowed.Add(1)
				}
			}()
		}
		group.Wait()
		same(t, "allowed", allowed.Load(), int64(3))
	})

	t.Run("two servers, one dead", func(t *testing.T) {
		dead := "http://" + freeAddress(t)
		both := newClient(t, Options{Servers: []string{dead, url}, FailClosed: true})
		same(t, "source", both.Limit(ctx, user("f")).Source, "server")
	})

	t.Run("hedging charges once", func(t *testing.T) {
		slow := faultyServer(t, "hang", "")
		for at, servers := range [][]string{{slow, url}, {url, url}} {
			name := fmt.Sprint("g", at)
			hedged := newClient(t, Options{Servers: servers, HedgeAfter: time.Millisecond})
			result := hedged.Limit(ctx, user(name))
			same(t, "allowed", []any{result.Allowed, result.Source}, []any{true, "server"})
			if at == 1 {
				hedged.Close()
			}
			same(t, "remaining", client.Peek(ctx, user(name)).Remaining, int64(2))
		}
	})

	t.Run("a context bounds a call", func(t *testing.T) {
		slow := newClient(t, Options{Servers: []string{faultyServer(t, "hang", "")}, Timeout: time.Hour, FailClosed: true})
		short, cancel := context.WithTimeout(ctx, 20*time.Millisecond)
		defer cancel()
		same(t, "reason", slow.Limit(short, Key("k")).Reason, "timeout")
		same(t, "reason", slow.Reserve(short, Key("k"), ReserveOptions{}).Reason, "timeout")
	})
}

const deniedBody = `{"allowed":false,"decision_id":"d","origin":"store","denied_by":"r","retry_after_ms":60000,"limits":[{"rule":"r","limit":1,"remaining":0,"reset_ms":60000,"over":true}]}`

// A caller must not be denied because of its own hedge, nor have such a denial repeated until it ends.
func TestHedgedDenials(t *testing.T) {
	ctx := context.Background()
	serve := func(answer func(http.ResponseWriter)) (string, *atomic.Int64) {
		var asked atomic.Int64
		server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			asked.Add(1)
			answer(w)
		}))
		t.Cleanup(server.Close)
		return server.URL, &asked
	}
	denies := func(w http.ResponseWriter) {
		w.WriteHeader(http.StatusTooManyRequests)
		fmt.Fprint(w, deniedBody)
	}
	allows := func(w http.ResponseWriter) { fmt.Fprint(w, allowedBody) }

	t.Run("a denial waits for the other request", func(t *testing.T) {
		responded := make(chan struct{})
		quick, asked := serve(func(w http.ResponseWriter) {
			denies(w)
			w.(http.Flusher).Flush()
			close(responded)
		})
		slow, _ := serve(func(w http.ResponseWriter) { <-responded; allows(w) })
		client := newClient(t, Options{Servers: []string{slow, quick}, HedgeAfter: time.Millisecond, Timeout: time.Minute})
		result := client.Limit(ctx, Key("k"))
		same(t, "result", []any{result.Allowed, result.Source, asked.Load()}, []any{true, "server", int64(1)})
		same(t, "cached", len(client.cache.entries), 0)
	})

	t.Run("at the deadline it counts and is not cached", func(t *testing.T) {
		quick, _ := serve(denies)
		client := newClient(t, Options{Servers: []string{faultyServer(t, "hang", ""), quick}, HedgeAfter: time.Millisecond, Timeout: 2 * time.Second})
		result := client.Limit(ctx, Key("k"))
		same(t, "result", []any{result.Allowed, result.Source, result.Reason}, []any{false, "server", "denied"})
		same(t, "cached", len(client.cache.entries), 0)
		alone := newClient(t, Options{Servers: []string{quick}})
		alone.Limit(ctx, Key("k"))
		same(t, "cached", len(alone.cache.entries), 1)
	})

	t.Run("calls take their hedges from one budget", func(t *testing.T) {
		quick, _ := serve(allows)
		client := newClient(t, Options{Servers: []string{faultyServer(t, "hang", ""), quick}, HedgeAfter: time.Millisecond, Timeout: 2 * time.Second})
		for _, balance := range []int64{9_000, 8_100} {
			same(t, "source", client.Limit(ctx, Key("k")).Source, "server")
			same(t, "budget", client.hedges.budget.balance, balance)
		}
		client.Reserve(ctx, Key("k"), ReserveOptions{})
		same(t, "budget", client.hedges.budget.balance, int64(7_200))
	})

	t.Run("the p95 counts first requests that their hedges overtook", func(t *testing.T) {
		responded := make(chan struct{})
		quick, _ := serve(func(w http.ResponseWriter) {
			allows(w)
			w.(http.Flusher).Flush()
			close(responded)
		})
		slow, _ := serve(func(w http.ResponseWriter) { <-responded; time.Sleep(20 * time.Millisecond); allows(w) })
		client := newClient(t, Options{Servers: []string{slow, quick}, HedgeAfter: HedgeAtP95, Timeout: time.Minute})
		same(t, "default", client.hedgeAfter(), 3*time.Millisecond)
		// The call is the hundredth, with which the estimate is made.
		for range 90 {
			client.latency.record(time.Millisecond, false)
		}
		for range 9 {
			client.latency.record(500*time.Millisecond, false)
		}
		same(t, "source", client.Limit(ctx, Key("k")).Source, "server")
		client.Peek(ctx, Key("k"))
		client.Close()
		same(t, "recorded", client.latency.recorded.Load(), uint32(100))
		same(t, "estimate", client.hedgeAfter(), 512*time.Millisecond)
	})

	t.Run("a fixed time to hedge after measures nothing", func(t *testing.T) {
		server, _ := serve(allows)
		client := newClient(t, Options{Servers: []string{server, server}, HedgeAfter: 2500 * time.Microsecond, Timeout: time.Minute})
		same(t, "source", client.Limit(ctx, Key("k")).Source, "server")
		client.Close()
		same(t, "recorded", client.latency.recorded.Load(), uint32(0))
		same(t, "time", client.hedgeAfter(), 2500*time.Microsecond)
	})

	t.Run("a time to hedge after that is none", func(t *testing.T) {
		_, err := New("test", Options{HedgeAfter: -time.Millisecond})
		same(t, "error", err.Error(), "tollgate: HedgeAfter is -1ms; write a time such as 3*time.Millisecond, or HedgeAtP95")
	})

	t.Run("a reservation that both servers return is not canceled", func(t *testing.T) {
		responded, body := make(chan struct{}), strings.TrimSuffix(allowedBody, "}")+`,"reservation":"r"}`
		quick, quickAsked := serve(func(w http.ResponseWriter) {
			fmt.Fprint(w, body)
			w.(http.Flusher).Flush()
			close(responded)
		})
		slow, slowAsked := serve(func(w http.ResponseWriter) { <-responded; fmt.Fprint(w, body) })
		client := newClient(t, Options{Servers: []string{slow, quick}, HedgeAfter: time.Millisecond, Timeout: time.Minute})
		same(t, "id", client.Reserve(ctx, Key("k"), ReserveOptions{IdempotencyKey: "i"}).ID(), "r")
		client.Close()
		same(t, "asked", []int64{slowAsked.Load(), quickAsked.Load()}, []int64{1, 1})
	})

	t.Run("a server that has used its share of the deadline moves back", func(t *testing.T) {
		quick, _ := serve(allows)
		client := newClient(t, Options{Servers: []string{faultyServer(t, "hang", ""), quick}, HedgeAfter: 2 * time.Second, Timeout: 2 * time.Second})
		same(t, "source", client.Limit(ctx, Key("k")).Source, "server")
		same(t, "order", client.failover.order(client.now()), []int{1, 0})
		same(t, "budget", client.hedges.budget.balance, int64(10_000))
	})
}

// Counts that goroutines lose or halve below zero would make the estimate jump.
func TestLatencyP95OfManyGoroutines(t *testing.T) {
	latency, total := newLatencyP95(), uint32(0)
	var group sync.WaitGroup
	for range 4 {
		group.Add(1)
		go func() {
			defer group.Done()
			for at := range 25_000 {
				took := 2 * time.Millisecond
				if at%20 < 2 {
					took = 9 * time.Millisecond
				}
				latency.record(took, false)
			}
		}()
	}
	group.Wait()
	same(t, "estimate", latency.get(), 9*time.Millisecond)
	for at := range latency.counts {
		total += latency.counts[at].Load()
	}
	if total >= 2*halveAt {
		t.Errorf("%d are counted", total)
	}
}

// faultyServer does one thing: cut, cut_body, hang, slow_body, or responds.
func faultyServer(t *testing.T, does, response string) string {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	stop := make(chan struct{})
	t.Cleanup(func() { close(stop); listener.Close() })
	go func() {
		for {
			connection, err := listener.Accept()
			if err != nil {
				return
			}
			go func() {
				defer connection.Close()
				for {
					request, err := http.ReadRequest(bufio.NewReader(connection))
					if err != nil {
						return
					}
					body := make([]byte, request.ContentLength)
					_, _ = request.Body.Read(body)
					switch does {
					case "cut":
						return
					case "hang":
						<-stop
						return
					case "cut_body", "slow_body":
						fmt.Fprint(connection, "HTTP/1.1 200 OK\r\ncontent-length: 90\r\n\r\n{\"allowed\":")
						if does == "slow_body" {
							<-stop
						}
						return
					}
					fmt.Fprint(connection, response)
				}
			}()
		}
	}()
	return "http://" + listener.Addr().String()
}

func TestFaults(t *testing.T) {
	var document struct {
		Cases []struct {
			Name    string
			Policy  string
			Servers []any
			Expect  struct {
				Allowed        bool
				Source, Reason string
				RetryAfter     *int64 `json:"retry_after_ms"`
				Asked          []int
			}
		}
	}
	load(t, "faults", &document)
	for _, each := range document.Cases {
		t.Run(each.Name, func(t *testing.T) {
			var urls []string
			for _, does := range each.Servers {
				switch does := does.(type) {
				case string:
					if does == "refused" {
						urls = append(urls, "http://"+freeAddress(t))
					} else {
						urls = append(urls, faultyServer(t, does, ""))
					}
				case map[string]any:
					body := does["body"].(string)
					response := fmt.Sprintf("HTTP/1.1 %v x\r\ncontent-length: %d\r\n\r\n%s", does["status"], len(body), body)
					urls = append(urls, faultyServer(t, "respond", response))
				}
			}
			var faults []string
			client := newClient(t, Options{
				Servers: urls, FailClosed: each.Policy == "closed", Timeout: time.Duration(len(urls)) * 300 * time.Millisecond,
				OnFault: func(server, _ string) { faults = append(faults, server) },
			})
			result := client.Limit(context.Background(), Key("k"))
			asked := []int{}
			for _, server := range faults {
				asked = append(asked, slices.Index(urls, server))
			}
			if result.Source == "server" {
				asked = append(asked, len(asked))
			}
			same(t, "result", []any{result.Allowed, result.Source, result.Reason, result.RetryAfter, asked}, []any{
				each.Expect.Allowed, each.Expect.Source, each.Expect.Reason, millis(optional(each.Expect.RetryAfter)), each.Expect.Asked,
			})
		})
	}
}

func TestWrongOptionsAreExplained(t *testing.T) {
	for _, each := range []struct {
		domain, part string
		options      Options
	}{
		{"", "domain", Options{}},
		{"d", "write http://", Options{Servers: []string{"ftp://x"}}},
		{"d", "negative", Options{Timeout: -1}},
	} {
		if _, err := New(each.domain, each.options); err == nil || !strings.Contains(err.Error(), each.part) {
			t.Errorf("%v", err)
		}
	}
}

func TestTransport(t *testing.T) {
	type answer struct {
		status int
		fields map[string]string
	}
	api := func(t *testing.T, script ...answer) (*httptest.Server, *[]int) {
		var lock sync.Mutex
		statuses, window, used := []int{}, int64(0), 0
		server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			lock.Lock()
			defer lock.Unlock()
			now := time.Now().Unix()
			if now != window {
				window, used = now, 0
			}
			used++
			status, fields := 200, map[string]string{"RateLimit-Policy": `"api";q=10;w=1`, "RateLimit": fmt.Sprintf(`"api";r=%d;t=1`, max(0, 10-used))}
			if used > 10 {
				status = 429
			}
			if len(script) > 0 {
				status, fields, script = script[0].status, script[0].fields, script[1:]
			}
			for name, value := range fields {
				w.Header().Set(name, value)
			}
			statuses = append(statuses, status)
			w.WriteHeader(status)
		}))
		t.Cleanup(server.Close)
		return server, &statuses
	}
	get := func(client *http.Client, url string) (int, error) {
		response, err := client.Get(url)
		if err != nil {
			return 0, err
		}
		response.Body.Close()
		return response.StatusCode, nil
	}

	t.Run("a refused request is repeated after the time that was asked for", func(t *testing.T) {
		server, statuses := api(t, answer{429, map[string]string{"Retry-After": "1"}}, answer{200, nil})
		started := time.Now()
		status, err := get(&http.Client{Transport: &Transport{}}, server.URL)
		same(t, "status", []any{status, err}, []any{200, error(nil)})
		same(t, "statuses", *statuses, []int{429, 200})
		if time.Since(started) < time.Second {
			t.Error("it did not wait")
		}
	})
	t.Run("only idempotent methods are repeated", func(t *testing.T) {
		server, statuses := api(t, answer{503, nil})
		response, err := (&http.Client{Transport: &Transport{}}).Post(server.URL, "text/plain", strings.NewReader("x"))
		if err != nil {
			t.Fatal(err)
		}
		response.Body.Close()
		same(t, "statuses", *statuses, []int{503})
	})
	t.Run("a wait that is too long is an error and sends nothing", func(t *testing.T) {
		server, statuses := api(t, answer{429, map[string]string{"Retry-After": "50"}})
		client := &http.Client{Transport: &Transport{MaxWait: 100 * time.Millisecond}}
		status, _ := get(client, server.URL)
		same(t, "status", status, 429)
		_, err := get(client, server.URL)
		var throttled *ThrottledError
		if !errors.As(err, &throttled) || len(*statuses) != 1 {
			t.Errorf("%v, %v", err, *statuses)
		}
	})
	t.Run("paces before the limit", func(t *testing.T) {
		server, statuses := api(t)
		client := &http.Client{Transport: &Transport{}}
		for range 25 {
			if status, err := get(client, server.URL); status != 200 {
				t.Fatal(status, err)
			}
		}
		refused := 0
		for _, status := range *statuses {
			if status == 429 {
				refused++
			}
		}
		if refused > 2 {
			t.Errorf("refused %d times", refused)
		}
	})
	t.Run("throttles itself while most requests are refused", func(t *testing.T) {
		script := make([]answer, 500)
		for at := range script {
			script[at] = answer{429, nil}
		}
		server, statuses := api(t, script...)
		client, rejected := &http.Client{Transport: &Transport{MaxRetries: -1}}, 0
		for range 300 {
			if _, err := get(client, server.URL); err != nil {
				rejected++
			}
		}
		if rejected < 150 || len(*statuses) != 300-rejected {
			t.Errorf("%d rejected, %d sent", rejected, len(*statuses))
		}
	})
}
