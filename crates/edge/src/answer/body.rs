//! The body of a denial.

use super::{AnswerSettings, BodyForm, Facts, Policy, Ruled};
use bytes::Bytes;
use serde_json::{Value, json};
use tollgate_engine::Window;

const TYPES: &str = "https://iana.org/assignments/http-problem-types#";

pub(super) fn of(settings: &AnswerSettings, facts: &Facts<'_>) -> (&'static str, Bytes) {
    let (kind, body) = match settings.body {
        BodyForm::Problem => ("application/problem+json", problem(settings, facts)),
        BodyForm::Plain => ("application/json", plain(facts)),
    };
    (kind, Bytes::from(body.to_string()))
}

fn problem(settings: &AnswerSettings, facts: &Facts<'_>) -> Value {
    let (kind, title) = match facts.ruled {
        Ruled::Unavailable => ("temporary-reduced-capacity", "Temporarily not decidable"),
        _ if facts.is_abnormal => ("abnormal-usage-detected", "Unusually many requests"),
        _ => ("quota-exceeded", "Over the limit"),
    };
    let mut body = json!({
        "type": format!("{TYPES}{kind}"),
        "title": title,
        "status": settings.status(facts.ruled).as_u16(),
        "detail": message(facts),
        "retry_after": facts.retry_after,
    });
    if facts.ruled == Ruled::Over {
        let violated = facts.policies.iter().filter(|policy| policy.is_over);
        body["violated-policies"] = violated.map(policy_name).collect();
    }
    if let Some(decision) = facts.decision {
        body["decision_id"] = decision.to_string().into();
    }
    body
}

/// The policy's name as the fields have it.
fn policy_name(policy: &Policy<'_>) -> String {
    let name = policy.rule.chars().map(|char| if matches!(char, ' '..='~') { char } else { '?' });
    let name: String = name.collect();
    if policy.is_one_of_several { format!("{name}/{}", policy.window) } else { name }
}

fn plain(facts: &Facts<'_>) -> Value {
    let code = if facts.ruled == Ruled::Over { "RATE_LIMITED" } else { "UNAVAILABLE" };
    let mut error = json!({
        "code": code,
        "message": message(facts),
        "retry_after": facts.retry_after,
    });
    if let Some(nearest) = facts.nearest() {
        error["limit"] = nearest.quota.into();
        error["window"] = nearest.window.to_string().into();
    }
    if let Some(rule) = facts.denied_by {
        error["scope"] = rule.into();
    }
    json!({ "error": error })
}

fn message(facts: &Facts<'_>) -> String {
    let seconds = facts.retry_after;
    let again = format!("Retry after {seconds} second{}.", if seconds == 1 { "" } else { "s" });
    let limit = facts.nearest().filter(|_| facts.ruled == Ruled::Over).map(|nearest| match nearest.window {
        Window::Held => format!("At most {} at once. ", nearest.quota),
        window => format!("At most {} in {window}. ", nearest.quota),
    });
    let what = if facts.ruled == Ruled::Over { "Rate limit exceeded" } else { "No decision can be made" };
    format!("{what}. {}{again}", limit.unwrap_or_default())
}
