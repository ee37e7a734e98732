// A management server that nobody here wrote: go-control-plane, as Envoy Gateway uses it, driven over standard input.
//
//	xds -address 127.0.0.1:0 [-cert FILE -key FILE -client-ca FILE]
//
// Each line of input is a snapshot: {"node": "n", "version": "1", "configs": [...]}, with RateLimitConfig in the JSON
// of protobuf. Each line of output is an event: listening, a request of a client, a stream that opened or closed.
package main

import (
	"bufio"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"flag"
	"log"
	"net"
	"os"
	"sync"

	core "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	discovery "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"github.com/envoyproxy/go-control-plane/pkg/cache/types"
	"github.com/envoyproxy/go-control-plane/pkg/cache/v3"
	"github.com/envoyproxy/go-control-plane/pkg/resource/v3"
	"github.com/envoyproxy/go-control-plane/pkg/server/v3"
	ratelimit "github.com/envoyproxy/go-control-plane/ratelimit/config/ratelimit/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/encoding/protojson"
)

type snapshot struct {
	Node    string            `json:"node"`
	Version string            `json:"version"`
	Configs []json.RawMessage `json:"configs"`
}

var output sync.Mutex

func report(event map[string]any) {
	output.Lock()
	defer output.Unlock()
	if err := json.NewEncoder(os.Stdout).Encode(event); err != nil {
		log.Fatal(err)
	}
}

func callbacks() server.Callbacks {
	return server.CallbackFuncs{
		StreamOpenFunc: func(ctx context.Context, id int64, _ string) error {
			headers, _ := metadata.FromIncomingContext(ctx)
			report(map[string]any{"event": "open", "stream": id, "headers": headers})
			return nil
		},
		StreamClosedFunc: func(id int64, _ *core.Node) {
			report(map[string]any{"event": "closed", "stream": id})
		},
		StreamRequestFunc: func(id int64, request *discovery.DiscoveryRequest) error {
			event := map[string]any{
				"event": "request", "stream": id, "version": request.GetVersionInfo(), "nonce": request.GetResponseNonce(),
				"type": request.GetTypeUrl(), "node": request.GetNode().GetId(),
				"metadata": request.GetNode().GetMetadata().AsMap(), "error": request.GetErrorDetail().GetMessage(),
				"names": len(request.GetResourceNames()),
			}
			report(event)
			return nil
		},
	}
}

func options(certificate, key, clients string) []grpc.ServerOption {
	if certificate == "" {
		return nil
	}
	own, err := tls.LoadX509KeyPair(certificate, key)
	if err != nil {
		log.Fatal(err)
	}
	config := &tls.Config{Certificates: []tls.Certificate{own}, MinVersion: tls.VersionTLS12}
	if clients != "" {
		text, err := os.ReadFile(clients)
		if err != nil {
			log.Fatal(err)
		}
		config.ClientCAs = x509.NewCertPool()
		config.ClientCAs.AppendCertsFromPEM(text)
		config.ClientAuth = tls.RequireAndVerifyClientCert
	}
	return []grpc.ServerOption{grpc.Creds(credentials.NewTLS(config))}
}

func main() {
	address := flag.String("address", "127.0.0.1:0", "where to listen")
	certificate := flag.String("cert", "", "certificate, for TLS")
	key := flag.String("key", "", "its key")
	clients := flag.String("client-ca", "", "CA of clients' certificates, which are required then")
	flag.Parse()
	snapshots := cache.NewSnapshotCache(true, cache.IDHash{}, nil)
	grpcServer := grpc.NewServer(options(*certificate, *key, *clients)...)
	discovery.RegisterAggregatedDiscoveryServiceServer(
		grpcServer, server.NewServer(context.Background(), snapshots, callbacks()))
	listener, err := net.Listen("tcp", *address)
	if err != nil {
		log.Fatal(err)
	}
	report(map[string]any{"event": "listening", "address": listener.Addr().String()})
	go func() { log.Fatal(grpcServer.Serve(listener)) }()

	lines := bufio.NewScanner(os.Stdin)
	lines.Buffer(nil, 64<<20)
	for lines.Scan() {
		var next snapshot
		if err := json.Unmarshal(lines.Bytes(), &next); err != nil {
			log.Fatal(err)
		}
		resources := []types.Resource{}
		for _, text := range next.Configs {
			config := &ratelimit.RateLimitConfig{}
			if err := protojson.Unmarshal(text, config); err != nil {
				log.Fatal(err)
			}
			resources = append(resources, config)
		}
		made, err := cache.NewSnapshot(next.Version, map[resource.Type][]types.Resource{resource.RateLimitConfigType: resources})
		if err != nil {
			log.Fatal(err)
		}
		if err := snapshots.SetSnapshot(context.Background(), next.Node, made); err != nil {
			log.Fatal(err)
		}
		report(map[string]any{"event": "set", "version": next.Version})
	}
}
