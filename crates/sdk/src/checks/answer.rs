//! Reads a server's responses. Every field is checked: a proxy's error page, a truncated body or another program at the
//! address becomes a fault, which the next server or the fail policy handles, never an allowance
//! (`clients/conformance/README.md`, section Answers).

#[cfg(feature = "remote-http")]
use super::result::Closed;
use super::result::{CallerProblem, CheckReason, CheckResult, Fault, RuleResponse};
use bytes::Bytes;
use serde_json::{Map, Value};
use std::borrow::Cow;
use std::time::Duration;

/// Maximum size of a response, in bytes.
pub(crate) const MAX_BODY: usize = 65_536;
/// The largest number that all clients represent exactly.
const MAX_INTEGER: u64 = (1 << 53) - 1;

const TOO_LARGE: &[u8] = br#"{"type":"about:blank","title":"Request header fields too large","status":431,"detail":"The header fields are too large to be checked."}"#;

/// A result, and what of it is not the caller's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Answer {
    pub(crate) result: CheckResult,
    pub(crate) reservation: Option<String>,
    /// The denial holds until its end, whatever others do.
    pub(crate) is_cacheable: bool,
}

impl From<CheckResult> for Answer {
    fn from(result: CheckResult) -> Self {
        Self { result, reservation: None, is_cacheable: false }
    }
}

/// Reads a response of `/v1/check` or `/v1/reserve`.
pub(crate) fn read_check(status: u16, body: &Bytes) -> Result<Answer, Fault> {
    match status {
        400 => Ok(CheckResult::rejected(head_problem(status, body)).into()),
        // Only a request head makes a check so large.
        413 => {
            let problem = CallerProblem { status: 431, body: Bytes::from_static(TOO_LARGE) };
            Ok(CheckResult::rejected(Some(problem)).into())
        }
        409 | 422 => Ok(CheckResult::rejected(None).into()),
        // Either the credential of the request that is checked cannot be read, or the client's own token is wrong.
        401 => match head_problem(status, body) {
            Some(problem) => Ok(CheckResult::rejected(Some(problem)).into()),
            None => Err(Fault::Unauthorized),
        },
        403 => Err(Fault::Unauthorized),
        200 | 429 | 503 => match Object::read(body).filter(|decision| decision.0.contains_key("allowed")) {
            Some(decision) => read_decision(status, &decision).ok_or(Fault::InvalidResponse),
            None if status == 200 => Err(Fault::InvalidResponse),
            None => Err(Fault::Unavailable),
        },
        500..=599 => Err(Fault::Unavailable),
        _ => Err(Fault::InvalidResponse),
    }
}

/// Reads a response of `/v1/settle` or `/v1/cancel`.
#[cfg(feature = "remote-http")]
pub(crate) fn read_closed(status: u16, body: &[u8]) -> Closed {
    let object = || Object::read(body);
    match status {
        401 | 403 => Closed::Fault(Fault::Unauthorized),
        400 | 422 => Closed::Rejected,
        409 => Closed::Conflict,
        429 | 500..=599 => Closed::Fault(Fault::Unavailable),
        404 if object().is_some_and(|problem| problem.0.contains_key("title")) => Closed::Unknown,
        200 => {
            let Some(closed) = object() else { return Closed::Fault(Fault::InvalidResponse) };
            match closed.integer("cost") {
                Some(cost) if closed.flag("settled") => Closed::Settled(cost),
                _ if closed.flag("cancelled") => Closed::Canceled,
                _ => Closed::Fault(Fault::InvalidResponse),
            }
        }
        _ => Closed::Fault(Fault::InvalidResponse),
    }
}

/// Returns the problem of a request head that the server refuses; `None` for every other reason to refuse a check.
fn head_problem(status: u16, body: &Bytes) -> Option<CallerProblem> {
    let field = Object::read(body)?.text("field")?;
    // A credential is found in the whole head, never in a part.
    let is_head = field == "request" || (status == 400 && field.starts_with("request."));
    is_head.then(|| CallerProblem { status, body: body.clone() })
}

/// A limit of a decision.
struct LimitAnswer {
    rule: String,
    limit: u64,
    remaining: u64,
    reset_ms: u64,
    /// It counts for the verdict: its role is none, or that of a quota.
    decides: bool,
    is_over: bool,
    is_concurrent: bool,
}

impl LimitAnswer {
    fn read(limit: &Value) -> Option<Self> {
        let limit = Object(Cow::Borrowed(limit.as_object()?));
        let role = limit.text("role");
        Some(Self {
            rule: limit.text("rule")?,
            limit: limit.integer("limit")?,
            remaining: limit.integer("remaining")?,
            reset_ms: limit.integer("reset_ms")?,
            decides: matches!(role.as_deref(), None | Some("quota")),
            is_over: limit.flag("over"),
            is_concurrent: limit.text("window").as_deref() == Some("concurrent"),
        })
    }
}

/// Reads a decision; `None` if it is none.
fn read_decision(status: u16, decision: &Object<'_>) -> Option<Answer> {
    let is_allowed = decision.0.get("allowed")?.as_bool()?;
    if is_allowed != (status == 200) {
        return None;
    }
    let limits = decision.0.get("limits")?.as_array()?;
    let limits = limits.iter().map(LimitAnswer::read).collect::<Option<Vec<_>>>()?;
    let decision_id = decision.text("decision_id")?;
    let retry_after_ms = decision.optional("retry_after_ms", Object::integer)?;
    let delay_ms = decision.optional("delay_ms", Object::integer)?.unwrap_or(0);
    let origin = decision.optional("origin", Object::text)?;
    let denied_by = decision.optional("denied_by", Object::text)?;
    let reservation = decision.optional("reservation", Object::text)?;

    let is_shed = decision.optional("shed", Object::text)?.is_some() || origin.as_deref() == Some("shed");

    let reason = match origin.as_deref() {
        Some("shed") => CheckReason::Shed,
        // The rule's fail policy decided: because of the overload, or because the store is unavailable.
        Some("fail_open" | "fail_closed") if is_shed => CheckReason::Shed,
        Some("fail_open") => CheckReason::FailOpen,
        Some("fail_closed") => CheckReason::FailClosed,
        Some("unmatched") => CheckReason::Unmatched,
        _ if is_allowed => CheckReason::Allowed,
        _ => CheckReason::Denied,
    };
    let is_cacheable = status == 429
        && origin.as_deref() == Some("store")
        && !is_shed
        && retry_after_ms.is_some_and(|wait| wait > 0)
        && !limits.iter().any(|limit| limit.is_over && limit.is_concurrent);
    let reported = reported_limit(is_allowed, denied_by.as_deref(), &limits);
    let millis = Duration::from_millis;
    let result = CheckResult {
        rule: if is_allowed { reported.map(|limit| limit.rule.clone()) } else { denied_by.clone() },
        limit: reported.map(|limit| limit.limit),
        remaining: reported.map(|limit| limit.remaining),
        reset_after: reported.map(|limit| millis(limit.reset_ms)),
        retry_after: if is_allowed { Some(Duration::ZERO) } else { retry_after_ms.map(millis) },
        delay: millis(delay_ms),
        decision_id: Some(decision_id),
        origin,
        is_shed,
        response: decision.object("response").map(|response| rule_response(&response)),
        ..CheckResult::by_server(is_allowed, reason)
    };
    Some(Answer { result, reservation, is_cacheable })
}

fn rule_response(response: &Object<'_>) -> RuleResponse {
    let status = response.integer("status").and_then(|status| u16::try_from(status).ok());
    RuleResponse {
        status: status.filter(|status| (400..600).contains(status)),
        body: response.text("body").map(Bytes::from),
        content_type: response.text("content_type"),
    }
}

/// Returns the limit that is most likely to deny the next request, or that denied this one; the first of several.
fn reported_limit<'a>(
    is_allowed: bool,
    denied_by: Option<&str>,
    limits: &'a [LimitAnswer],
) -> Option<&'a LimitAnswer> {
    let deciding = limits.iter().filter(|limit| limit.decides && (is_allowed || limit.is_over));
    // `min_by_key` returns the first of equal ones.
    deciding.min_by_key(|limit| {
        let longest = std::cmp::Reverse(limit.reset_ms);
        match is_allowed {
            true => (limit.remaining, longest),
            false => (u64::from(denied_by != Some(limit.rule.as_str())), longest),
        }
    })
}

/// A JSON object of at most [`MAX_BODY`] bytes.
struct Object<'a>(Cow<'a, Map<String, Value>>);

impl Object<'_> {
    fn read(body: &[u8]) -> Option<Self> {
        if body.len() > MAX_BODY {
            return None;
        }
        serde_json::from_slice(body).ok().map(|members| Self(Cow::Owned(members)))
    }

    fn flag(&self, name: &str) -> bool {
        self.0.get(name).and_then(Value::as_bool).unwrap_or(false)
    }

    fn object(&self, name: &str) -> Option<Object<'_>> {
        self.0.get(name).and_then(Value::as_object).map(|object| Object(Cow::Borrowed(object)))
    }

    fn text(&self, name: &str) -> Option<String> {
        self.0.get(name).and_then(Value::as_str).map(str::to_owned)
    }

    fn integer(&self, name: &str) -> Option<u64> {
        let number = self.0.get(name)?.as_number()?;
        // One that is written as 5.0 or 5e0, or is beyond 64 bits, is read as a floating-point number.
        let float = || number.as_f64().filter(|float| *float >= 0.0 && float.fract() == 0.0);
        // Saturates, which the bound below does anyway.
        let number = number.as_u64().or_else(|| float().map(|float| float as u64));
        number.map(|number| number.min(MAX_INTEGER))
    }

    /// Reads a member that may be absent or null; `None` if it is neither, and not what `read` expects.
    fn optional<T>(&self, name: &str, read: impl Fn(&Self, &str) -> Option<T>) -> Option<Option<T>> {
        match self.0.get(name) {
            None | Some(Value::Null) => Some(None),
            Some(_) => read(self, name).map(Some),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conformance_cases::load_cases;
    use serde_json::json;

    fn cases<'a>(data: &'a Value, name: &str) -> &'a Vec<Value> {
        data[name].as_array().filter(|all| !all.is_empty()).expect("cases")
    }

    fn body(case: &Value) -> Bytes {
        let mut body = case["body"].as_str().expect("a body").as_bytes().to_vec();
        let length = case["pad_with_spaces_to_bytes"].as_u64().map_or(0, |length| length as usize);
        body.resize(body.len().max(length), b' ');
        body.into()
    }

    fn status(case: &Value) -> u16 {
        case["status"].as_u64().and_then(|status| status.try_into().ok()).expect("a status")
    }

    fn shown(answer: &Answer) -> Value {
        let millis =
            |time: Option<Duration>| time.map(|time| u64::try_from(time.as_millis()).expect("short"));
        let result = &answer.result;
        json!({
            "allowed": result.is_allowed, "source": result.source.as_str(), "reason": result.reason.as_str(),
            "origin": result.origin, "rule": result.rule, "limit": result.limit, "remaining": result.remaining,
            "reset_ms": millis(result.reset_after), "retry_after_ms": millis(result.retry_after),
            "delay_ms": millis(Some(result.delay)), "decision_id": result.decision_id,
            "reservation": answer.reservation, "cacheable": answer.is_cacheable, "shed": result.is_shed,
        })
    }

    /// A response that is misread is an allowance that nobody gave, or a denial that never ends.
    #[test]
    fn answers_are_read_as_by_the_other_clients() {
        let data = load_cases("answers");
        assert_eq!(data["max_body_bytes"], MAX_BODY);
        for case in cases(&data, "check") {
            let read = read_check(status(case), &body(case));
            match case["fault"].as_str() {
                Some(fault) => assert_eq!(read.map_err(Fault::as_str), Err(fault), "{}", case["name"]),
                None => {
                    let answer = read.unwrap_or_else(|fault| panic!("{}: {fault}", case["name"]));
                    assert_eq!(shown(&answer), case["result"], "{}", case["name"]);
                    let own = answer.result.response.map(|own| {
                        let body = own.body.map(|body| String::from_utf8_lossy(&body).into_owned());
                        json!({"status": own.status, "body": body, "content_type": own.content_type})
                    });
                    assert_eq!(own.as_ref(), case.get("response"), "{}", case["name"]);
                }
            }
        }
    }

    #[cfg(feature = "remote-http")]
    #[test]
    fn reservations_end_as_by_the_other_clients() {
        for case in cases(&load_cases("answers"), "settle_and_cancel") {
            let (ended, cost, reason) = match read_closed(status(case), &body(case)) {
                Closed::Settled(cost) => (Some("settled"), Some(cost), None),
                Closed::Canceled => (Some("canceled"), None, None),
                Closed::Unknown => (None, None, Some("unknown")),
                Closed::Conflict => (None, None, Some("conflict")),
                Closed::Rejected => (None, None, Some("rejected")),
                Closed::Fault(fault) => {
                    assert_eq!(case["fault"], fault.as_str(), "{}", case["name"]);
                    continue;
                }
            };
            assert_eq!(
                json!({"ended": ended, "cost": cost, "reason": reason}),
                case["result"],
                "{}",
                case["name"]
            );
        }
    }

    /// Whose fault a refusal is decides between a 400 to the caller and an outage.
    #[test]
    fn refusals_of_heads_are_told_apart_as_by_the_other_clients() {
        for case in cases(&load_cases("heads"), "answers") {
            let read = read_check(status(case), &body(case));
            if let Some(fault) = case["fault"].as_str() {
                assert_eq!(read.map_err(Fault::as_str), Err(fault), "{}", case["name"]);
                continue;
            }
            let result = read.unwrap_or_else(|fault| panic!("{}: {fault}", case["name"])).result;
            let problem = result.problem.as_ref();
            let shown = json!({
                "allowed": result.is_allowed, "reason": result.reason.as_str(), "source": result.source.as_str(),
                "problem_status": problem.map(|problem| problem.status),
            });
            assert_eq!(shown, case["result"], "{}", case["name"]);
            if let Some(problem) = problem.filter(|problem| problem.status == status(case)) {
                assert_eq!(problem.body, body(case), "{}", case["name"]);
            }
        }
    }
}
