// A service that limits its callers, and a client of it that is never refused. Needs a running server with the rules
// beside this file:
//
//	tollgate serve --rules examples/go/rules.yaml &
//	cd examples/go && go run .
package main

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"os"
	"sync"
	"time"

	tollgate "tollgate.dev/client"
)

func main() {
	limiter, err := tollgate.New("shop", tollgate.Options{
		Servers: []string{cmp.Or(os.Getenv("TOLLGATE_URL"), "http://127.0.0.1:8080")}, Timeout: time.Second,
	})
	if err != nil {
		log.Fatal(err)
	}
	defer limiter.Close()
	tokensOf := func(user string) tollgate.Subject {
		return tollgate.Attributes(map[string]string{"model_user": user})
	}

	// The service: four requests in two seconds for each API key, and a budget of tokens for each.
	mux := http.NewServeMux()
	mux.HandleFunc("GET /answer", func(w http.ResponseWriter, request *http.Request) {
		tokens := limiter.Reserve(request.Context(), tokensOf(request.Header.Get("X-Api-Key")), tollgate.ReserveOptions{Cost: 500})
		if !tokens.OK() {
			http.Error(w, "no tokens left", http.StatusTooManyRequests)
			return
		}
		answer := "42"
		tokens.Settle(request.Context(), int64(len(answer))) // the estimate was 500
		fmt.Fprint(w, answer)
	})
	server := httptest.NewServer(limiter.Middleware(mux))
	defer server.Close()

	// A plain client runs into the limit.
	var group sync.WaitGroup
	statuses := make([]int, 6)
	for at := range statuses {
		group.Add(1)
		go func() {
			defer group.Done()
			statuses[at] = call(http.DefaultClient, server.URL, "plain")
		}()
	}
	group.Wait()
	fmt.Println("plain http.Client:", outcome(statuses))

	// A polite one reads the response's RateLimit fields, and slows down before it.
	polite := &http.Client{Transport: &tollgate.Transport{}}
	for at := range statuses {
		statuses[at] = call(polite, server.URL, "polite")
	}
	fmt.Println("polite http.Client:", outcome(statuses))
	fmt.Println("tokens used:", 10_000-limiter.Peek(context.Background(), tokensOf("polite")).Remaining)
}

func call(client *http.Client, url, key string) int {
	request, err := http.NewRequest(http.MethodGet, url+"/answer", nil)
	if err != nil {
		log.Fatal(err)
	}
	request.Header.Set("X-Api-Key", key)
	response, err := client.Do(request)
	if err != nil {
		log.Fatal(err)
	}
	defer response.Body.Close()
	_, _ = io.Copy(io.Discard, response.Body)
	return response.StatusCode
}

func outcome(statuses []int) string {
	for _, status := range statuses {
		if status == http.StatusTooManyRequests {
			return "refused"
		}
	}
	return "not refused"
}
