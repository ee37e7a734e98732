package tollgate

import (
	"bytes"
	"encoding/json"
	"errors"
	"math"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"
)

// Responses of a Tollgate server, decoded: a result, or a fault that sends the client to its next server. The rules are
// in clients/conformance/README.md. A response that is not understood is a fault, never an allowance.

const (
	maxBody    = 65_536
	maxInteger = 1<<53 - 1

	faultUnreachable  = "unreachable"
	faultTimeout      = "timeout"
	faultUnavailable  = "unavailable"
	faultUnauthorized = "unauthorized"
	faultInvalid      = "invalid_response"
)

// fault is a server that gave no usable answer.
type fault string

func (f fault) Error() string { return string(f) }

var errInvalid = errors.New("invalid")

// decoded is a result with what only a guarded server needs.
type decoded struct {
	result Result
	// holdsPermit tells that a concurrency limit is among the limits.
	holdsPermit bool
	// problem is what the server found wrong with a check that it rejected.
	problem *problem
}

// problem is a problem document; fields that the client does not know are kept in text.
type problem struct {
	status int
	field  string
	text   []byte
}

// isCallers tells that the head that was checked is no request's, that servers would read it differently, or that its
// credential is unreadable.
func (p *problem) isCallers() bool {
	if p == nil {
		return false
	}
	// A credential is found in the whole head, never in a part.
	isPart := p.status == 400 && strings.HasPrefix(p.field, "request.")
	return isPart || p.field == "request" && (p.status == 400 || p.status == 401)
}

func decodeCheck(status int, body []byte) (decoded, error) {
	switch status {
	case 400, 409, 413, 422:
		return decoded{result: rejectedResult(), problem: decodeProblem(status, body)}, nil
	case 401, 403:
		// The caller's credential in the head that was sent, not the client's own: no other server reads it differently.
		if found := decodeProblem(status, body); found.isCallers() {
			return decoded{result: rejectedResult(), problem: found}, nil
		}
		return decoded{}, fault(faultUnauthorized)
	case 200, 429, 503:
		document, err := readObject(body)
		if err == nil && document.get("allowed") != nil {
			result, holdsPermit, err := decision(status, document)
			if err != nil {
				return decoded{}, fault(faultInvalid)
			}
			return decoded{result: result, holdsPermit: holdsPermit}, nil
		}
		if status == 200 {
			return decoded{}, fault(faultInvalid)
		}
		return decoded{}, fault(faultUnavailable)
	}
	if status >= 500 {
		return decoded{}, fault(faultUnavailable)
	}
	return decoded{}, fault(faultInvalid)
}

func decodeProblem(status int, body []byte) *problem {
	document, err := readObject(body)
	if err != nil {
		return nil
	}
	field, _ := optionalText(document.get("field"))
	return &problem{status, field, body}
}

func decodeEnded(status int, body []byte) (Ended, error) {
	switch {
	case status == 401 || status == 403:
		return Ended{}, fault(faultUnauthorized)
	case status == 400 || status == 422:
		return Ended{Reason: "rejected"}, nil
	case status == 409:
		return Ended{Reason: "conflict"}, nil
	case status >= 500 || status == 429:
		return Ended{}, fault(faultUnavailable)
	}
	document, err := readObject(body)
	if err != nil {
		return Ended{}, fault(faultInvalid)
	}
	if status == 404 && document.get("title") != nil {
		return Ended{Reason: "unknown"}, nil
	}
	settled, canceled := isTrue(document.get("settled")), isTrue(document.get("cancelled"))
	if status == 200 && settled {
		if cost, err := integer(document.get("cost")); err == nil {
			return Ended{Outcome: "settled", Cost: cost}, nil
		}
	} else if status == 200 && canceled {
		return Ended{Outcome: "canceled"}, nil
	}
	return Ended{}, fault(faultInvalid)
}

func integer(raw json.RawMessage) (int64, error) {
	if small, err := strconv.ParseInt(string(raw), 10, 64); err == nil && small >= 0 {
		return min(small, maxInteger), nil
	}
	// An integer may be written as 5.0 or 5e0, or be larger than 64 bits.
	number, err := strconv.ParseFloat(string(raw), 64)
	if err != nil || number < 0 || number != math.Trunc(number) {
		return 0, errInvalid
	}
	return int64(min(number, maxInteger)), nil
}

func text(raw json.RawMessage) (string, error) {
	// Most have nothing to unescape.
	if end := len(raw) - 1; end > 0 && raw[0] == '"' && bytes.IndexByte(raw, '\\') < 0 && utf8.Valid(raw) {
		return string(raw[1:end]), nil
	}
	var value *string
	if raw == nil || json.Unmarshal(raw, &value) != nil || value == nil {
		return "", errInvalid
	}
	return *value, nil
}

func optionalText(raw json.RawMessage) (string, error) {
	if raw == nil || string(raw) == "null" {
		return "", nil
	}
	return text(raw)
}

type limitAnswer struct {
	rule                    string
	limit, remaining, reset int64
	decides, over           bool
	window                  string
}

func decodeLimit(raw json.RawMessage) (limitAnswer, error) {
	document, ok := splitObject(raw)
	if !ok {
		return limitAnswer{}, errInvalid
	}
	var limit limitAnswer
	var errs [4]error
	limit.rule, errs[0] = text(document.get("rule"))
	limit.limit, errs[1] = integer(document.get("limit"))
	limit.remaining, errs[2] = integer(document.get("remaining"))
	limit.reset, errs[3] = integer(document.get("reset_ms"))
	limit.over = isTrue(document.get("over"))
	limit.window, _ = text(document.get("window"))
	role, _ := text(document.get("role"))
	limit.decides = role == "" || role == "quota"
	return limit, errors.Join(errs[:]...)
}

// ruleResponse reads the response that the denying rule sets; nil if there is none.
func ruleResponse(raw json.RawMessage) *RuleResponse {
	var read *struct {
		Status      int     `json:"status"`
		Body        *string `json:"body"`
		ContentType string  `json:"content_type"`
	}
	if raw == nil || json.Unmarshal(raw, &read) != nil || read == nil {
		return nil
	}
	response := RuleResponse{ContentType: read.ContentType}
	if read.Status >= 400 && read.Status < 600 {
		response.Status = read.Status
	}
	if read.Body != nil {
		response.Body = []byte(*read.Body)
	}
	return &response
}

func isTrue(raw json.RawMessage) bool { return string(raw) == "true" }

func decision(status int, document object) (Result, bool, error) {
	raw := document.get("allowed")
	allowed := isTrue(raw)
	if !allowed && string(raw) != "false" || allowed != (status == 200) {
		return Result{}, false, errInvalid
	}
	raws, ok := splitArray(document.get("limits"))
	if !ok {
		return Result{}, false, errInvalid
	}
	limits := make([]limitAnswer, len(raws))
	isConcurrent, holdsPermit := false, false
	for at, raw := range raws {
		limit, err := decodeLimit(raw)
		if err != nil {
			return Result{}, false, err
		}
		limits[at] = limit
		holdsPermit = holdsPermit || limit.window == "concurrent"
		isConcurrent = isConcurrent || limit.over && limit.window == "concurrent"
	}
	id, err := text(document.get("decision_id"))
	if err != nil {
		return Result{}, false, err
	}
	retryAfter, delay := int64(-1), int64(0)
	if raw := document.get("retry_after_ms"); raw != nil && string(raw) != "null" {
		if retryAfter, err = integer(raw); err != nil {
			return Result{}, false, err
		}
	}
	if raw := document.get("delay_ms"); raw != nil && string(raw) != "null" {
		if delay, err = integer(raw); err != nil {
			return Result{}, false, err
		}
	}
	origin, err1 := optionalText(document.get("origin"))
	deniedBy, err2 := optionalText(document.get("denied_by"))
	reservation, err3 := optionalText(document.get("reservation"))
	_, err4 := optionalText(document.get("shed"))
	if err := errors.Join(err1, err2, err3, err4); err != nil {
		return Result{}, false, err
	}
	isShed := origin == "shed" || document.get("shed") != nil && string(document.get("shed")) != "null"

	result := Result{
		Allowed: allowed, Source: "server", Reason: "denied", Origin: origin, Rule: deniedBy, Limit: -1, Remaining: -1,
		ResetAfter: Unknown, RetryAfter: millis(retryAfter), Delay: millis(delay), DecisionID: id, reservation: reservation,
		Shed: isShed, cacheable: status == 429 && origin == "store" && !isShed && retryAfter > 0 && !isConcurrent,
	}
	result.Response = ruleResponse(document.get("response"))
	reported := reportedLimit(allowed, deniedBy, limits)
	if reported != nil {
		result.Limit, result.Remaining, result.ResetAfter = reported.limit, reported.remaining, millis(reported.reset)
	}
	if allowed {
		result.Reason, result.Rule, result.RetryAfter = "allowed", "", 0
		if reported != nil {
			result.Rule = reported.rule
		}
	}
	switch {
	case origin == "shed", isShed && (origin == "fail_open" || origin == "fail_closed"):
		result.Reason = "shed"
	case origin == "fail_open", origin == "fail_closed", origin == "unmatched":
		result.Reason = origin
	}
	return result, holdsPermit, nil
}

// reportedLimit returns the limit that is most likely to deny the next request, or that denied this one.
func reportedLimit(allowed bool, deniedBy string, limits []limitAnswer) *limitAnswer {
	var best *limitAnswer
	for at := range limits {
		limit := &limits[at]
		if !limit.decides || !allowed && !limit.over {
			continue
		}
		switch {
		case best == nil:
			best = limit
		case allowed && (limit.remaining < best.remaining || limit.remaining == best.remaining && limit.reset > best.reset):
			best = limit
		case !allowed && (limit.rule == deniedBy) != (best.rule == deniedBy):
			if limit.rule == deniedBy {
				best = limit
			}
		case !allowed && limit.reset > best.reset:
			best = limit
		}
	}
	return best
}

// millis returns milliseconds as a duration; times beyond 292 years are that long.
func millis(ms int64) time.Duration {
	if ms < 0 {
		return Unknown
	}
	if ms > int64(1<<63-1)/int64(time.Millisecond) {
		return time.Duration(1<<63 - 1)
	}
	return time.Duration(ms) * time.Millisecond
}
