package tollgate

import (
	"bytes"
	"compress/gzip"
	"context"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"
)

const allowedBody = `{"allowed":true,"limits":[],"decision_id":"d","origin":"unmatched"}`

// rawServer writes bytes of its own to everyone who sends something: first, then again until the other side has gone.
func rawServer(t *testing.T, first, again string, pause time.Duration) string {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	t.Cleanup(func() { close(done); listener.Close() })
	serve := func(connection net.Conn) {
		defer connection.Close()
		if _, err := connection.Read(make([]byte, 65_536)); err != nil {
			return
		}
		if _, err := connection.Write([]byte(first)); err != nil {
			return
		}
		for again != "" {
			select {
			case <-done:
				return
			case <-time.After(pause):
			}
			if _, err := connection.Write([]byte(again)); err != nil {
				return
			}
		}
	}
	go func() {
		for {
			connection, err := listener.Accept()
			if err != nil {
				return
			}
			go serve(connection)
		}
	}()
	return "http://" + listener.Addr().String()
}

func closedClient(t *testing.T, url string, change func(*Options)) *Client {
	t.Helper()
	options := Options{Servers: []string{url}, FailClosed: true, Timeout: 10 * time.Second}
	if change != nil {
		change(&options)
	}
	client, err := New("test", options)
	if err != nil {
		t.Fatal(err)
	}
	return client
}

// What a broken or hostile server sends is bounded in size and time, and becomes a fault, never an allowance.
func TestBrokenServers(t *testing.T) {
	var packed bytes.Buffer
	writer := gzip.NewWriter(&packed)
	fmt.Fprintf(writer, "%s%s", allowedBody, strings.Repeat(" ", 4<<20))
	writer.Close()
	head, spaces := "HTTP/1.1 200 OK\r\n", strings.Repeat(" ", 16_384)
	digits := strings.Repeat("9", 5_000)
	whole := func(body string) string { return fmt.Sprintf("%scontent-length: %d\r\n\r\n%s", head, len(body), body) }
	for _, each := range []struct{ name, first, again, reason string }{
		{"a body without end", head + "\r\n", spaces, faultInvalid},
		{"a body that unpacks to more than the bound", fmt.Sprintf("%scontent-encoding: gzip\r\ncontent-length: %d\r\n\r\n%s", head, packed.Len(), packed.String()), "", faultInvalid},
		{"a length of many digits", head + "content-length: " + digits + "\r\n\r\n", "", faultUnreachable},
		{"chunks without end", head + "transfer-encoding: chunked\r\n\r\n", "4000\r\n" + spaces + "\r\n", faultInvalid},
		{"fields without end", head, strings.Repeat("x-field: 1\r\n", 1_000), faultUnreachable},
		{"a field without end", head + "x-field: ", strings.Repeat("x", 16_384), faultUnreachable},
		{"not HTTP", "SSH-2.0-x\r\n\r\n", "", faultUnreachable},
		{"an integer of many digits", whole(strings.TrimSuffix(allowedBody, "}") + `,"delay_ms":` + digits + "}"), "", faultInvalid},
		{"lists without end", whole(`{"allowed":` + strings.Repeat("[", 60_000)), "", faultInvalid},
		{"a connection that ends inside of the body", whole(allowedBody)[:len(whole(allowedBody))-5], "", faultUnreachable},
	} {
		t.Run(each.name, func(t *testing.T) {
			result := closedClient(t, rawServer(t, each.first, each.again, 0), nil).Limit(context.Background(), Key("x"))
			same(t, "result", [3]any{result.Allowed, result.Source, result.Reason}, [3]any{false, "policy", each.reason})
		})
	}
	t.Run("interim responses come before the answer", func(t *testing.T) {
		hints := strings.Repeat("HTTP/1.1 103 Early Hints\r\nlink: </x>\r\n\r\n", 3)
		result := closedClient(t, rawServer(t, hints+whole(allowedBody), "", 0), nil).Limit(context.Background(), Key("x"))
		same(t, "reason", result.Reason, "unmatched")
	})
	t.Run("a body that drips", func(t *testing.T) {
		url := rawServer(t, head+"content-length: 60000\r\n\r\n", " ", 5*time.Millisecond)
		client := closedClient(t, url, func(options *Options) { options.Timeout = 100 * time.Millisecond })
		same(t, "reason", client.Limit(context.Background(), Key("x")).Reason, faultTimeout)
	})
}

// The token is sent to its own server alone, also by an HTTP client that the caller made.
func TestRedirectsAreNotFollowed(t *testing.T) {
	var asked atomic.Int64
	other := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { asked.Add(1) }))
	defer other.Close()
	server := httptest.NewServer(http.RedirectHandler(other.URL, http.StatusTemporaryRedirect))
	defer server.Close()
	for _, sender := range []*http.Client{nil, {}} {
		client := closedClient(t, server.URL, func(options *Options) { options.HTTPClient, options.Token = sender, "secret" })
		same(t, "reason", client.Limit(context.Background(), Key("x")).Reason, faultInvalid)
	}
	same(t, "requests elsewhere", asked.Load(), int64(0))
}

// Neither a server's numbers nor a caller's words may overflow or be remembered without bound.
func TestBounds(t *testing.T) {
	same(t, "the longest time", wholeSeconds(time.Duration(1<<63-1)), int64(9_223_372_037))
	same(t, "a rounded time", wholeSeconds(1_500*time.Millisecond), int64(2))
	admission := &Admission{Header: http.Header{}}
	admission.retry(1 << 62)
	same(t, "the longest Retry-After", admission.RetryAfter > 0, true)
	same(t, "endpoint", endpointOf(Head{Method: strings.Repeat("X", 9_000), Path: "/" + strings.Repeat("y", 9_000)}), "* /*")

	var asked atomic.Int64
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		asked.Add(1)
		w.WriteHeader(429)
		fmt.Fprint(w, `{"allowed":false,"denied_by":"r","retry_after_ms":315360000000,"limits":[],"decision_id":"d","origin":"store"}`)
	}))
	defer server.Close()
	client := closedClient(t, server.URL, nil)
	for range 2 {
		same(t, "source", client.Limit(context.Background(), Key(strings.Repeat("x", 5_000))).Source, "server")
	}
	client.Limit(context.Background(), Key("x"))
	denied := client.Limit(context.Background(), Key("x"))
	same(t, "source", denied.Source, "cache")
	same(t, "requests", asked.Load(), int64(3))
	same(t, "ten years", denied.RetryAfter > 9*365*24*time.Hour, true)
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	same(t, "it is not waited for", client.Limiter(Key("x")).Wait(ctx) != nil, true)
}

// An overloaded server has answered: nothing is cached, no other server is asked, and callers get its time.
func TestShed(t *testing.T) {
	var asked atomic.Int64
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		asked.Add(1)
		w.WriteHeader(503)
		fmt.Fprint(w, `{"allowed":false,"denied_by":"login","retry_after_ms":1000,"limits":[],"decision_id":"d","origin":"fail_closed","shed":"security"}`)
	}))
	defer server.Close()
	faults := 0
	client := closedClient(t, server.URL, func(options *Options) { options.OnFault = func(string, string) { faults++ } })
	for range 2 {
		result := client.Limit(context.Background(), Key("x"))
		same(t, "result", [4]any{result.Shed, result.Reason, result.Source, result.RetryAfter}, [4]any{true, "shed", "server", time.Second})
	}
	admission := client.Guard(GuardOptions{Permits: NoPermits}).Admit(context.Background(), Head{Method: "GET", Path: "/"}, 1, nil)
	same(t, "response", [2]any{admission.Status, admission.Header.Get("Retry-After")}, [2]any{503, "1"})
	same(t, "requests and faults", [2]int64{asked.Load(), int64(faults)}, [2]int64{3, 0})
}
