package tollgate

import "time"

// Result is the decision about one request. A negative duration means unknown or never; a pointer that is nil, unknown.
type Result struct {
	Allowed bool
	// Source is "server", "cache" (a denial that is still in force) or "policy" (no server could be asked).
	Source string
	// Reason is "allowed", "denied", "unmatched", "fail_open", "fail_closed", "shed" or "rejected"; for "policy" the
	// fault: "unreachable", "timeout", "unavailable", "unauthorized" or "invalid_response".
	Reason string
	// Origin is what the server's decision rests on, such as "store".
	Origin string
	// Shed tells that the server was overloaded itself and decided without its store. Denials say when to ask again, and
	// are not cached.
	Shed bool
	// Rule is the rule that denied, or the one whose limit is reported.
	Rule string
	// Limit, Remaining and ResetAfter are those of one limit; -1 if there is none.
	Limit, Remaining int64
	ResetAfter       time.Duration
	// RetryAfter is 0 if allowed, and negative if the same request would never be allowed, or if that is unknown.
	RetryAfter time.Duration
	// Delay is how long an allowed request should wait (rules with `action: delay`).
	Delay      time.Duration
	DecisionID string
	// Response is what the denying rule has callers answered with; nil if it sets nothing. The middleware answers so.
	Response *RuleResponse

	reservation string
	cacheable   bool
}

// RuleResponse is the response that a rule sets for its denials, as far as it sets it.
type RuleResponse struct {
	// Status is 0 if the rule sets none, Body nil.
	Status      int
	Body        []byte
	ContentType string
}

// Unknown is the duration of what is not known or never comes.
const Unknown = time.Duration(-1)

func policyResult(open bool, reason string) Result {
	result := Result{Allowed: open, Source: "policy", Reason: reason, Limit: -1, Remaining: -1, ResetAfter: Unknown}
	if !open {
		result.RetryAfter = Unknown
	}
	return result
}

func rejectedResult() Result {
	return Result{Source: "server", Reason: "rejected", Limit: -1, Remaining: -1, ResetAfter: Unknown, RetryAfter: Unknown}
}

// Ended tells what became of a reservation.
type Ended struct {
	// Outcome is "settled", "canceled", or empty if the reservation was not ended.
	Outcome string
	// Cost is the cost that was settled.
	Cost int64
	// Reason is why it was not ended: "unknown", "conflict", "rejected", or a fault.
	Reason string
}
