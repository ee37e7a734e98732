// Package tollgategrpc limits the callers of a gRPC server by a Tollgate server. It is a module of its own, so that the
// client needs only the standard library.
//
//	limiter, err := tollgate.New("shop", tollgate.Options{})
//	guard := tollgategrpc.New(limiter, tollgate.GuardOptions{})
//	server := grpc.NewServer(grpc.UnaryInterceptor(guard.Unary), grpc.StreamInterceptor(guard.Stream))
//
// A call is checked as the HTTP/2 request that it is: POST, with the full method as its path and the metadata as its
// fields. So the endpoint of a rule is `POST /package.Service/Method`.
package tollgategrpc

import (
	"context"
	"encoding/base64"
	"net/http"
	"strings"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	tollgate "tollgate.dev/client"
)

// Guard has the interceptors of a server.
type Guard struct {
	guard *tollgate.Guard
	// Cost is the cost of a call by its full method; 1 if nil.
	Cost func(ctx context.Context, fullMethod string) int64
	// Attributes are checked besides what identifies the caller.
	Attributes func(ctx context.Context, fullMethod string) map[string]string
	// Skip returns whether a call passes unchecked.
	Skip func(ctx context.Context, fullMethod string) bool
}

// New returns the interceptors. Of the options, those about permits and delays count: the functions are for HTTP requests.
func New(client *tollgate.Client, options tollgate.GuardOptions) *Guard {
	return &Guard{guard: client.Guard(options)}
}

// Unary is a grpc.UnaryServerInterceptor. Permits are given back when the handler returns.
func (g *Guard) Unary(ctx context.Context, request any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	if g.Skip != nil && g.Skip(ctx, info.FullMethod) {
		return handler(ctx, request)
	}
	admission := g.admit(ctx, info.FullMethod)
	defer admission.Done()
	_ = grpc.SetHeader(ctx, fields(admission))
	if err := refusal(admission); err != nil {
		return nil, err
	}
	return handler(admission.Context(ctx), request)
}

// Stream is a grpc.StreamServerInterceptor. A stream is one call: its messages are not counted.
func (g *Guard) Stream(server any, stream grpc.ServerStream, info *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
	ctx := stream.Context()
	if g.Skip != nil && g.Skip(ctx, info.FullMethod) {
		return handler(server, stream)
	}
	admission := g.admit(ctx, info.FullMethod)
	defer admission.Done()
	_ = stream.SetHeader(fields(admission))
	if err := refusal(admission); err != nil {
		return err
	}
	return handler(server, &guardedStream{stream, admission.Context(ctx)})
}

type guardedStream struct {
	grpc.ServerStream
	ctx context.Context
}

func (s *guardedStream) Context() context.Context { return s.ctx }

func (g *Guard) admit(ctx context.Context, method string) *tollgate.Admission {
	cost, attributes := int64(1), map[string]string(nil)
	if g.Cost != nil {
		cost = g.Cost(ctx, method)
	}
	if g.Attributes != nil {
		attributes = g.Attributes(ctx, method)
	}
	head := tollgate.Head{Method: http.MethodPost, Path: method}
	if from, ok := peer.FromContext(ctx); ok && from.Addr != nil {
		// Addresses of Unix sockets and of connections in memory are names.
		if network := from.Addr.Network(); strings.HasPrefix(network, "tcp") {
			head.Peer = from.Addr.String()
		}
	}
	received, _ := metadata.FromIncomingContext(ctx)
	for name, values := range received {
		switch {
		case name == ":authority":
			name = "host"
		case strings.HasPrefix(name, ":"):
			continue
		}
		for _, value := range values {
			if strings.HasSuffix(name, "-bin") {
				value = base64.RawStdEncoding.EncodeToString([]byte(value))
			}
			head.Fields = append(head.Fields, [2]string{name, value})
		}
	}
	return g.guard.Admit(ctx, head, cost, attributes)
}

// fields returns the rate limit fields as metadata.
func fields(admission *tollgate.Admission) metadata.MD {
	found := metadata.MD{}
	for name, values := range admission.Header {
		if name != "Content-Type" {
			found.Append(name, values...)
		}
	}
	return found
}

func refusal(admission *tollgate.Admission) error {
	code, text := codes.OK, ""
	switch admission.Status {
	case http.StatusOK:
		return nil
	case http.StatusTooManyRequests:
		code, text = codes.ResourceExhausted, "rate limit exceeded"
	case http.StatusServiceUnavailable:
		code, text = codes.Unavailable, "the call could not be checked"
	case http.StatusUnauthorized:
		code, text = codes.Unauthenticated, "unreadable credential"
	default:
		code, text = codes.InvalidArgument, "ambiguous request"
	}
	refused := status.New(code, text)
	if admission.RetryAfter >= 0 {
		retry := &errdetails.RetryInfo{RetryDelay: durationpb.New(admission.RetryAfter)}
		if detailed, err := refused.WithDetails(retry); err == nil {
			refused = detailed
		}
	}
	return refused.Err()
}
