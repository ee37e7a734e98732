package tollgate

import (
	"context"
	"fmt"
	"time"
)

// Limiter has the shape of golang.org/x/time/rate's Limiter over a limit that all processes share.
type Limiter struct {
	client  *Client
	subject Subject
}

// Limiter returns a limiter for one subject.
func (c *Client) Limiter(subject Subject) *Limiter { return &Limiter{c, subject} }

// Allow reports whether one event may happen now.
func (l *Limiter) Allow() bool { return l.AllowN(1) }

// AllowN reports whether n events may happen now.
func (l *Limiter) AllowN(n int) bool {
	return l.client.LimitN(context.Background(), l.subject, int64(n)).Allowed
}

// Wait blocks until one event may happen.
func (l *Limiter) Wait(ctx context.Context) error { return l.WaitN(ctx, 1) }

// WaitN blocks until n events may happen. It fails at once if that is never, or after the context's deadline.
func (l *Limiter) WaitN(ctx context.Context, n int) error {
	for {
		result := l.client.LimitN(ctx, l.subject, int64(n))
		if err := ctx.Err(); err != nil {
			return err
		}
		if result.Allowed {
			return pause(ctx, result.Delay)
		}
		if result.RetryAfter < 0 {
			return fmt.Errorf("tollgate: Wait(n=%d) would never be allowed: %s %s", n, result.Reason, result.Rule)
		}
		wait := max(time.Millisecond, result.RetryAfter)
		if at, ok := ctx.Deadline(); ok && time.Until(at) < wait {
			return fmt.Errorf("tollgate: Wait(n=%d) would exceed the context's deadline", n)
		}
		if err := pause(ctx, wait); err != nil {
			return err
		}
	}
}

// Reserve charges one event that can be canceled.
func (l *Limiter) Reserve(ctx context.Context) *Reservation {
	return l.client.Reserve(ctx, l.subject, ReserveOptions{})
}

// OK reports whether the event may happen.
func (r *Reservation) OK() bool { return r.Allowed }
