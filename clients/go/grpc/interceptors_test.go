package tollgategrpc

import (
	"context"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	tollgate "tollgate.dev/client"
)

const rules = `
domain: test
descriptors:
  - {key: api_key, name: per-key, limit: 3/hour, algorithm: fixed_window}
  - {key: endpoint, value: POST /grpc.health.v1.Health/Watch, name: watch, concurrency: 1}
`

func freeAddress(t *testing.T) string {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	return listener.Addr().String()
}

func startTollgate(t *testing.T) string {
	t.Helper()
	binary := os.Getenv("TOLLGATE_BINARY")
	if binary == "" {
		t.Fatal("set TOLLGATE_BINARY to a tollgate binary, or run `make clients-go-test`")
	}
	path := filepath.Join(t.TempDir(), "rules.yaml")
	if err := os.WriteFile(path, []byte(rules), 0o600); err != nil {
		t.Fatal(err)
	}
	address := freeAddress(t)
	command := exec.Command(binary, "serve", "--rules", path, "--http", address, "--grpc", freeAddress(t),
		"--admin", freeAddress(t), "--resp", freeAddress(t))
	command.Dir = filepath.Dir(path)
	if err := command.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = command.Process.Kill()
		_ = command.Wait()
	})
	until(t, func() bool {
		response, err := http.Get("http://" + address + "/readyz")
		if err != nil {
			return false
		}
		response.Body.Close()
		return response.StatusCode == http.StatusOK
	})
	return "http://" + address
}

func until(t *testing.T, what func() bool) {
	t.Helper()
	for end := time.Now().Add(time.Minute); !what(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("it did not happen")
		}
	}
}

// startServer starts a gRPC server with the health service: a unary method and a stream.
func startServer(t *testing.T, guard *Guard) healthpb.HealthClient {
	t.Helper()
	server := grpc.NewServer(grpc.UnaryInterceptor(guard.Unary), grpc.StreamInterceptor(guard.Stream))
	healthpb.RegisterHealthServer(server, health.NewServer())
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	go func() { _ = server.Serve(listener) }()
	t.Cleanup(server.Stop)
	connection, err := grpc.NewClient(listener.Addr().String(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { connection.Close() })
	return healthpb.NewHealthClient(connection)
}

func newClient(t *testing.T, options tollgate.Options) *tollgate.Client {
	t.Helper()
	options.Timeout = 5 * time.Second
	client, err := tollgate.New("test", options)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(client.Close)
	return client
}

func TestInterceptors(t *testing.T) {
	url := startTollgate(t)
	limiter := newClient(t, tollgate.Options{Servers: []string{url}})
	client := startServer(t, New(limiter, tollgate.GuardOptions{}))
	ctx := context.Background()

	t.Run("unary calls are limited by the caller's key", func(t *testing.T) {
		keyed := metadata.AppendToOutgoingContext(ctx, "x-api-key", "a", "trace-bin", "\x00\xff")
		for turn := range 4 {
			var header metadata.MD
			_, err := client.Check(keyed, &healthpb.HealthCheckRequest{}, grpc.Header(&header))
			want := codes.OK
			if turn == 3 {
				want = codes.ResourceExhausted
			}
			if status.Code(err) != want {
				t.Fatalf("call %d: %v", turn, err)
			}
			if remaining := header.Get("x-ratelimit-remaining"); len(remaining) != 1 || remaining[0] != []string{"2", "1", "0", "0"}[turn] {
				t.Errorf("call %d: %v", turn, header)
			}
			if turn == 3 {
				retry, ok := status.Convert(err).Details()[0].(*errdetails.RetryInfo)
				if !ok || retry.RetryDelay.AsDuration() <= 0 {
					t.Errorf("%v", status.Convert(err).Details())
				}
			}
		}
	})

	t.Run("a call that cannot be read is refused", func(t *testing.T) {
		ambiguous := metadata.AppendToOutgoingContext(ctx, "x-api-key", "a", "authorization", "Bearer b")
		_, err := client.Check(ambiguous, &healthpb.HealthCheckRequest{})
		if status.Code(err) != codes.InvalidArgument {
			t.Error(err)
		}
		unreadable := metadata.AppendToOutgoingContext(ctx, "authorization", "Bearer a b")
		_, err = client.Check(unreadable, &healthpb.HealthCheckRequest{})
		if status.Code(err) != codes.Unauthenticated {
			t.Error(err)
		}
	})

	t.Run("a stream holds its permit until it ends", func(t *testing.T) {
		for range 2 {
			leaving, cancel := context.WithCancel(ctx)
			stream, err := client.Watch(leaving, &healthpb.HealthCheckRequest{})
			if err != nil {
				t.Fatal(err)
			}
			if _, err := stream.Recv(); err != nil {
				t.Fatal(err)
			}
			second, err := client.Watch(ctx, &healthpb.HealthCheckRequest{})
			if err == nil {
				_, err = second.Recv()
			}
			if status.Code(err) != codes.ResourceExhausted {
				t.Errorf("second stream: %v", err)
			}
			cancel()
			head := tollgate.Head{Method: "POST", Path: "/grpc.health.v1.Health/Watch"}
			until(t, func() bool { return limiter.Peek(ctx, tollgate.Request(head, nil)).Remaining == 1 })
		}
	})

	t.Run("fails as chosen", func(t *testing.T) {
		dead := []string{"http://" + freeAddress(t)}
		_, err := startServer(t, New(newClient(t, tollgate.Options{Servers: dead}), tollgate.GuardOptions{})).Check(ctx, &healthpb.HealthCheckRequest{})
		if err != nil {
			t.Error(err)
		}
		closed := newClient(t, tollgate.Options{Servers: dead, FailClosed: true})
		_, err = startServer(t, New(closed, tollgate.GuardOptions{})).Check(ctx, &healthpb.HealthCheckRequest{})
		if status.Code(err) != codes.Unavailable {
			t.Error(err)
		}
		skipping := New(closed, tollgate.GuardOptions{})
		skipping.Skip = func(_ context.Context, method string) bool { return method == "/grpc.health.v1.Health/Check" }
		if _, err = startServer(t, skipping).Check(ctx, &healthpb.HealthCheckRequest{}); err != nil {
			t.Error(err)
		}
	})
}
