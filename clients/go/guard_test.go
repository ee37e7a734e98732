package tollgate

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

const webRules = `
domain: test
descriptors:
  - {key: api_key, name: per-key, limit: 3/hour, algorithm: fixed_window}
  - {key: endpoint, value: GET /slot/stream, name: stream, concurrency: 1}
  - {key: endpoint, value: GET /slot/panic, name: panic, concurrency: 1}
  - {key: endpoint, value: POST /login, name: login, limit: 1/hour}
  - {key: plan, value: small, name: small, limit: 1/hour}
  - {key: endpoint, value: GET /slow, name: slow, limit: {count: 10, period: 1s, burst: 5}, action: delay}
  - {key: endpoint, value: GET /queue, name: queue, limit: {count: 1, period: 1h, burst: 5}, action: delay}
`

// spy counts the requests to each path of the API.
type spy struct {
	lock  sync.Mutex
	paths []string
}

func (s *spy) RoundTrip(request *http.Request) (*http.Response, error) {
	s.lock.Lock()
	s.paths = append(s.paths, request.URL.Path)
	s.lock.Unlock()
	return http.DefaultTransport.RoundTrip(request)
}

func (s *spy) count(path string) int {
	s.lock.Lock()
	defer s.lock.Unlock()
	return len(slices.DeleteFunc(slices.Clone(s.paths), func(each string) bool { return each != path }))
}

func until(t *testing.T, what func() bool) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); !what(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("it did not happen")
		}
	}
}

func TestGuard(t *testing.T) {
	url := startServerWith(t, webRules)
	ctx := context.Background()
	spied := &spy{}
	client := newClient(t, Options{Servers: []string{url}, HTTPClient: &http.Client{Transport: spied}})
	goOn := make(chan struct{})
	var served atomic.Int64
	mux := http.NewServeMux()
	mux.HandleFunc("/slot/stream", func(w http.ResponseWriter, request *http.Request) {
		fmt.Fprint(w, "first")
		w.(http.Flusher).Flush()
		select {
		case <-goOn:
		case <-request.Context().Done():
		}
	})
	mux.HandleFunc("/slot/panic", func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) })
	mux.HandleFunc("/", func(w http.ResponseWriter, request *http.Request) {
		served.Add(1)
		w.Header().Set("X-RateLimit-Policy", "own")
		if result, ok := FromContext(request.Context()); ok {
			fmt.Fprint(w, result.Rule)
		}
	})
	serve := func(t *testing.T, guard *Guard) string {
		server := httptest.NewServer(guard.Middleware(mux))
		t.Cleanup(server.Close)
		return server.URL
	}
	get := func(t *testing.T, url, method string, headers ...string) (*http.Response, string) {
		t.Helper()
		request, _ := http.NewRequest(method, url, nil)
		for at := 0; at < len(headers); at += 2 {
			request.Header.Add(headers[at], headers[at+1])
		}
		response, err := http.DefaultClient.Do(request)
		if err != nil {
			t.Fatal(err)
		}
		defer response.Body.Close()
		body, _ := io.ReadAll(response.Body)
		return response, string(body)
	}
	free := func(path string) bool {
		return client.Peek(ctx, Request(Head{Method: "GET", Path: path}, nil)).Remaining == 1
	}

	t.Run("limits callers as the gateway identifies them", func(t *testing.T) {
		base := serve(t, client.Guard(GuardOptions{}))
		var statuses []int
		var remaining []string
		var last *http.Response
		var body string
		for range 4 {
			last, body = get(t, base+"/ok", "GET", "X-Api-Key", "a")
			statuses = append(statuses, last.StatusCode)
			remaining = append(remaining, last.Header.Get("X-RateLimit-Remaining"))
			if last.StatusCode == 200 {
				same(t, "rule", body, "per-key")
				same(t, "own field", last.Header.Values("X-RateLimit-Policy"), []string{"own"})
			}
		}
		same(t, "statuses", statuses, []int{200, 200, 200, 429})
		same(t, "remaining", remaining, []string{"2", "1", "0", "0"})
		same(t, "served", served.Load(), int64(3))
		var problem struct {
			Type       string
			Status     int
			RetryAfter int64    `json:"retry_after"`
			Policies   []string `json:"violated-policies"`
			Decision   string   `json:"decision_id"`
		}
		if err := json.Unmarshal([]byte(body), &problem); err != nil {
			t.Fatal(err)
		}
		same(t, "problem", []any{problem.Type, problem.Status, problem.Policies}, []any{problemTypes + "quota-exceeded", 429, []string{"per-key"}})
		same(t, "fields", []string{fmt.Sprint(problem.RetryAfter), problem.Decision, "application/problem+json"}, []string{
			last.Header.Get("Retry-After"), last.Header.Get("X-RateLimit-Decision-Id"), last.Header.Get("Content-Type"),
		})
		bearer, _ := get(t, base+"/ok", "GET", "Authorization", "Bearer a")
		same(t, "the same key in another field", bearer.StatusCode, 429)
		var spellings []int
		for _, path := range []string{"/login", "/%6cogin", "/login/?next=1"} {
			response, _ := get(t, base+path, "POST")
			spellings = append(spellings, response.StatusCode)
		}
		same(t, "one spelling", spellings, []int{200, 429, 429})
	})

	t.Run("a request that cannot be read is refused with the server's problem", func(t *testing.T) {
		for _, failClosed := range []bool{false, true} {
			other := newClient(t, Options{Servers: []string{url}, FailClosed: failClosed})
			base := serve(t, other.Guard(GuardOptions{}))
			response, body := get(t, base+"/ok", "GET", "X-Api-Key", "a", "Authorization", "Bearer b")
			same(t, "ambiguous", []any{response.StatusCode, strings.Contains(body, "Ambiguous request")}, []any{400, true})
			response, body = get(t, base+"/ok", "GET", "Authorization", "Bearer a b")
			same(t, "unreadable", []any{response.StatusCode, strings.Contains(body, "Unreadable credential")}, []any{401, true})
			same(t, "challenge", response.Header.Get("WWW-Authenticate"), "Bearer")
			response, _ = get(t, base+"/ok", "GET", "X-Api-Key", "caf\xc3\xa9")
			same(t, "raw bytes", response.StatusCode, 401)
			response, _ = get(t, base+"/ok", "GET", "X", strings.Repeat("x", 9_000))
			same(t, "a large field", response.StatusCode, 200)
			response, _ = get(t, base+"/ok", "GET", slices.Repeat([]string{"X", strings.Repeat("x", 8_000)}, 9)...)
			same(t, "large fields", response.StatusCode, 431)
		}
	})

	t.Run("a permit is given back when the response ends", func(t *testing.T) {
		base := serve(t, client.Guard(GuardOptions{}))
		settled := spied.count("/v1/settle")
		first, err := http.Get(base + "/slot/stream")
		if err != nil {
			t.Fatal(err)
		}
		denied, _ := get(t, base+"/slot/stream", "GET")
		same(t, "denied", []any{denied.StatusCode, denied.Header.Get("X-RateLimit-Denied-By")}, []any{429, "stream"})
		goOn <- struct{}{}
		_, _ = io.ReadAll(first.Body)
		first.Body.Close()
		until(t, func() bool { return free("/slot/stream") })
		same(t, "settled", spied.count("/v1/settle"), settled+1)
	})

	t.Run("a permit is given back once if the caller leaves or the handler fails", func(t *testing.T) {
		base := serve(t, client.Guard(GuardOptions{}))
		for range 3 {
			settled := spied.count("/v1/settle")
			leaving, cancel := context.WithCancel(ctx)
			request, _ := http.NewRequestWithContext(leaving, "GET", base+"/slot/stream", nil)
			response, err := http.DefaultClient.Do(request)
			if err != nil {
				t.Fatal(err)
			}
			same(t, "status", response.StatusCode, 200)
			cancel()
			response.Body.Close()
			until(t, func() bool { return free("/slot/stream") })
			if _, err := http.Get(base + "/slot/panic"); err == nil {
				t.Error("the handler has failed")
			}
			until(t, func() bool { return free("/slot/panic") })
			same(t, "settled", spied.count("/v1/settle"), settled+2)
		}
	})

	t.Run("a caller that leaves during the check holds nothing", func(t *testing.T) {
		guard := client.Guard(GuardOptions{})
		for turn := range 20 {
			leaving, cancel := context.WithTimeout(ctx, time.Duration(turn)*200*time.Microsecond)
			guard.Admit(leaving, Head{Method: "GET", Path: "/slot/stream"}, 1, nil).Done()
			cancel()
		}
		client.Close()
		same(t, "free", free("/slot/stream"), true)
	})

	t.Run("endpoints without a concurrency limit take one call after the first", func(t *testing.T) {
		other := &spy{}
		base := serve(t, newClient(t, Options{Servers: []string{url}, HTTPClient: &http.Client{Transport: other}}).Guard(GuardOptions{}))
		get(t, base+"/items/1", "GET", "X-Api-Key", "items")
		until(t, func() bool { return other.count("/v1/settle") == 1 })
		for _, path := range []string{"/items/2?page=1", "/items/3"} {
			get(t, base+path, "GET")
		}
		same(t, "calls", other.paths, []string{"/v1/reserve", "/v1/settle", "/v1/check", "/v1/check"})
	})

	t.Run("settings", func(t *testing.T) {
		base := serve(t, client.Guard(GuardOptions{
			Cost:       func(*http.Request) int64 { return 1 },
			Attributes: func(*http.Request) map[string]string { return map[string]string{"plan": "small"} },
			Skip:       func(request *http.Request) bool { return request.URL.Path == "/health" },
			Permits:    NoPermits,
		}))
		var statuses []int
		for _, path := range []string{"/ok", "/ok", "/health"} {
			response, _ := get(t, base+path, "GET", "X-Api-Key", "settings")
			statuses = append(statuses, response.StatusCode)
		}
		same(t, "statuses", statuses, []int{200, 429, 200})
		started := time.Now()
		for range 4 {
			response, _ := get(t, serve(t, client.Guard(GuardOptions{}))+"/slow", "GET")
			same(t, "delayed", response.StatusCode, 200)
		}
		if time.Since(started) < 200*time.Millisecond {
			t.Error("the delay was not waited for")
		}
		base = serve(t, client.Guard(GuardOptions{}))
		get(t, base+"/queue", "GET")
		late, _ := get(t, base+"/queue", "GET")
		same(t, "too long", late.StatusCode, 503)
	})

	t.Run("fails as chosen", func(t *testing.T) {
		dead := "http://" + freeAddress(t)
		for _, each := range []struct {
			servers    []string
			failClosed bool
			status     int
		}{{[]string{dead}, false, 200}, {[]string{dead}, true, 503}, {[]string{dead, url}, true, 200}} {
			base := serve(t, newClient(t, Options{Servers: each.servers, FailClosed: each.failClosed}).Guard(GuardOptions{}))
			response, body := get(t, base+"/ok", "GET")
			same(t, "status", response.StatusCode, each.status)
			if each.status == 503 {
				same(t, "field", response.Header.Get("Retry-After"), "1")
				same(t, "body", strings.Contains(body, "temporary-reduced-capacity"), true)
			}
		}
	})
}

func TestHeads(t *testing.T) {
	request := httptest.NewRequest("GET", "http://shop.example/a%2Fb?secret=1", nil)
	request.RemoteAddr = "[fe80::1%eth0]:4711"
	request.Header.Add("X-Two", "one")
	request.Header.Add("X-Two", "t\xffo")
	got := Request(HeadOf(request), map[string]string{"plan": "small"}).value.(headSubject).json()
	want := `"request":{"method":"GET","target":"http://shop.example/a%2Fb","peer":"fe80::1","headers":` +
		`[["Host","shop.example"],["X-Two","one"],["X-Two","tÿo"]]},"attributes":{"plan":"small"}`
	same(t, "head", got, want)
	same(t, "header unchanged", request.Header.Get("Host"), "")
	for peer, address := range map[string]string{"": "127.0.0.1", "@": "127.0.0.1", "192.0.2.1:80": "192.0.2.1", "192.0.2.1": "192.0.2.1", "[::1]:80": "::1"} {
		same(t, peer, peerAddress(peer), address)
	}
}

// FuzzHeads checks that whatever bytes a stranger sends become JSON of which each character is one byte.
func FuzzHeads(f *testing.F) {
	f.Add("GET", "/a", "v\xff\x00\n\"")
	f.Fuzz(func(t *testing.T, method, path, value string) {
		text := Request(Head{Method: method, Path: path, Fields: [][2]string{{"X", value}}}, nil).value.(headSubject).json()
		var document struct {
			Request struct{ Headers [][2]string }
		}
		if err := json.Unmarshal([]byte("{"+text+"}"), &document); err != nil {
			t.Fatal(err)
		}
		var raw bytes.Buffer
		for _, each := range document.Request.Headers[0][1] {
			raw.WriteByte(byte(each))
		}
		same(t, "bytes", raw.String(), value)
	})
}
