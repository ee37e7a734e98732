// An app behind the Go client's middleware, for the matrix. The field `x-matrix-server` chooses the server to ask; the port is
// printed.
package main

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"sync"
	"time"

	tollgate "tollgate.dev/client"
)

func main() {
	var lock sync.Mutex
	guarded := map[string]http.Handler{}
	hello := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "hello") })
	app := func(w http.ResponseWriter, r *http.Request) {
		url := r.Header.Get("x-matrix-server")
		r.Header.Del("x-matrix-server")
		lock.Lock()
		handler := guarded[url]
		if handler == nil {
			options := tollgate.Options{Servers: []string{url}, Timeout: time.Minute, FailClosed: true, DenyCache: -1}
			client, err := tollgate.New("d", options)
			if err != nil {
				panic(err)
			}
			handler = client.Middleware(hello)
			guarded[url] = handler
		}
		lock.Unlock()
		handler.ServeHTTP(w, r)
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		panic(err)
	}
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		os.Exit(0)
	}()
	fmt.Println(listener.Addr().(*net.TCPAddr).Port)
	panic(http.Serve(listener, http.HandlerFunc(app)))
}
