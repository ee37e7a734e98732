package tollgate

import (
	"context"
	"encoding/json"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"
)

// BenchmarkOverhead compares Limit with a bare call of the same check. The calls alternate, so that whatever else the
// machine does meets both; the ratio is that of their medians.
//
//	TOLLGATE_BINARY=… go test -run '^$' -bench Overhead -benchtime 5000x
func BenchmarkOverhead(b *testing.B) {
	url := startServer(b)
	client, err := New("test", Options{Servers: []string{url}, Timeout: 10 * time.Second})
	if err != nil {
		b.Fatal(err)
	}
	ctx := context.Background()
	var own, bare []time.Duration
	b.ResetTimer()
	for range b.N {
		started := time.Now()
		if client.Limit(ctx, Key("k")).Source != "server" {
			b.Fatal("no answer")
		}
		own = append(own, time.Since(started))
		started = time.Now()
		body := strings.NewReader(`{"domain":"test","attributes":{"api_key":"k"}}`)
		response, err := http.Post(url+"/v1/check", "application/json", body)
		if err != nil {
			b.Fatal(err)
		}
		var answer struct {
			Allowed bool
			Limits  []struct{ Limit, Remaining int64 }
		}
		if err := json.NewDecoder(response.Body).Decode(&answer); err != nil || !answer.Allowed {
			b.Fatal(err)
		}
		response.Body.Close()
		bare = append(bare, time.Since(started))
	}
	slices.Sort(own)
	slices.Sort(bare)
	middle := len(own) / 2
	b.ReportMetric(float64(own[middle].Microseconds()), "us/limit")
	b.ReportMetric(float64(bare[middle].Microseconds()), "us/bare")
	b.ReportMetric(float64(own[middle])/float64(bare[middle]), "ratio")
}
