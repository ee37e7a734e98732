package tollgate

import (
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// A module that imports the client from a path, with a program of three lines.
func TestAnEmptyModuleUsesTheClient(t *testing.T) {
	url := startServer(t)
	root, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	folder := t.TempDir()
	files := map[string]string{
		"go.mod": "module example\n\ngo 1.23\n\nrequire tollgate.dev/client v0.1.0\n\nreplace tollgate.dev/client => " + root + "\n",
		"main.go": fmt.Sprintf(`package main

import (
	"context"
	"fmt"
	"time"

	tollgate "tollgate.dev/client"
)

func main() {
	limiter, _ := tollgate.New("test", tollgate.Options{Servers: []string{%q}, Timeout: 5 * time.Second})
	result := limiter.Limit(context.Background(), tollgate.Key("key-1"))
	fmt.Println(result.Allowed, result.Source)
}
`, url),
	}
	for name, text := range files {
		if err := os.WriteFile(filepath.Join(folder, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for _, command := range []string{"vet", "run"} {
		run := exec.Command("go", command, ".")
		run.Dir = folder
		// The standard library is enough: nothing may be downloaded.
		run.Env = append(os.Environ(), "GOPROXY=off", "GOFLAGS=-mod=mod")
		output, err := run.CombinedOutput()
		if err != nil {
			t.Fatalf("go %s: %v\n%s", command, err, output)
		}
		if command == "run" {
			same(t, "output", strings.TrimSpace(string(output)), "true server")
		}
	}
}

// faultyProxy passes requests on to a server, and does to the answers what its fault says.
type faultyProxy struct {
	url   string
	fault atomic.Value
	goOn  chan struct{}
}

func newFaultyProxy(t *testing.T, server string) *faultyProxy {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	proxy := &faultyProxy{url: "http://" + listener.Addr().String(), goOn: make(chan struct{})}
	proxy.fault.Store("")
	t.Cleanup(func() { listener.Close() })
	go func() {
		for {
			connection, err := listener.Accept()
			if err != nil {
				return
			}
			go proxy.serve(connection, strings.TrimPrefix(server, "http://"))
		}
	}()
	return proxy
}

func (p *faultyProxy) serve(connection net.Conn, address string) {
	defer connection.Close()
	server, err := net.Dial("tcp", address)
	if err != nil {
		return
	}
	defer server.Close()
	buffer := make([]byte, 65_536)
	for {
		n, err := connection.Read(buffer)
		fault := p.fault.Load().(string)
		if err != nil || fault == "cut" {
			return
		}
		if _, err = server.Write(buffer[:n]); err != nil {
			return
		}
		if n, err = server.Read(buffer); err != nil {
			return
		}
		answer := string(buffer[:n])
		switch fault {
		case "slow":
			<-p.goOn
		case "cut answer":
			_, _ = io.WriteString(connection, answer[:n/2])
			return
		case "wrong JSON":
			answer = "HTTP/1.1 200 OK\r\ncontent-length: 15\r\n\r\n{\"allowed\":tru}"
		case "unavailable":
			answer = "HTTP/1.1 503 x\r\ncontent-length: 4\r\n\r\nbusy"
		}
		if _, err = io.WriteString(connection, answer); err != nil {
			return
		}
	}
}

// The client through a proxy that misbehaves: what is decided, and what is charged.
func TestFaultsOfAProxy(t *testing.T) {
	url := startServer(t)
	ctx := context.Background()
	for fault, reason := range map[string]string{
		"slow": faultTimeout, "cut": faultUnreachable, "cut answer": faultUnreachable, "wrong JSON": faultInvalid, "unavailable": faultUnavailable,
	} {
		t.Run(fault, func(t *testing.T) {
			proxy := newFaultyProxy(t, url)
			goOn := sync.OnceFunc(func() { close(proxy.goOn) })
			t.Cleanup(goOn)
			proxy.fault.Store(fault)
			for _, failClosed := range []bool{false, true} {
				client := newClient(t, Options{Servers: []string{proxy.url}, FailClosed: failClosed, Timeout: 400 * time.Millisecond})
				result := client.Limit(ctx, Key("k"))
				same(t, "result", []any{result.Source, result.Reason, result.Allowed}, []any{"policy", reason, !failClosed})
			}
			var faults []string
			client := newClient(t, Options{
				Servers: []string{proxy.url, url}, Timeout: 4 * time.Second,
				OnFault: func(server, reason string) { faults = append(faults, server+" "+reason) },
			})
			for range 2 {
				same(t, "the next server", client.Limit(ctx, Key("k")).Source, "server")
			}
			same(t, "faults", faults, []string{proxy.url + " " + reason})

			if fault == "slow" {
				slow := newClient(t, Options{Servers: []string{proxy.url}, Timeout: 400 * time.Millisecond})
				same(t, "late", slow.Reserve(ctx, user("late"), ReserveOptions{Cost: 3}).Reason, faultTimeout)
				proxy.fault.Store("")
				goOn()
				slow.Close()
				same(t, "given back", client.Peek(ctx, user("late")).Remaining, int64(3))
			}
			proxy.fault.Store("")
			healed := newClient(t, Options{Servers: []string{proxy.url}})
			same(t, "healed", healed.Limit(ctx, Key("k")).Source, "server")
		})
	}
}
