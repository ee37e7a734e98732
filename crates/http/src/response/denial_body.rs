//! The body of a denial, written directly into its bytes: a flood of denials must stay cheap.

use super::{BodyFormat, DecisionSummary, Disposition, Policy, ResponseConfig};
use std::io::Write;
use tollgate_engine::Window;
use tollgate_rules::{BodyField, BodyTemplate, FieldValue};

/// Initial capacity in bytes; most bodies are shorter.
const ROOM: usize = 384;

pub(super) fn write(
    settings: &ResponseConfig,
    facts: &DecisionSummary<'_>,
    out: &mut Vec<u8>,
) -> &'static str {
    out.reserve(ROOM);
    if let Some(template) = facts.response.and_then(|response| response.body.as_deref()) {
        render(template, facts, out);
        return template.media_type();
    }
    let mut json = Json(out);
    match settings.body {
        BodyFormat::Problem => {
            problem(settings, facts, &mut json);
            "application/problem+json"
        }
        BodyFormat::Plain => {
            plain(settings, facts, &mut json);
            "application/json"
        }
        BodyFormat::Minimal => {
            minimal(settings, facts, &mut json);
            "application/problem+json"
        }
    }
}

/// Appends a rule's body with what is known of the denial.
pub fn render(template: &BodyTemplate, facts: &DecisionSummary<'_>, out: &mut Vec<u8>) {
    let denying = facts.denying();
    let number = |number: Option<u64>| number.map_or(FieldValue::Unknown, FieldValue::Number);
    let text = |text: String| FieldValue::Text(text.into());
    let value = |field| match field {
        BodyField::Rule => facts.denied_by.map_or(FieldValue::Unknown, |rule| FieldValue::Text(rule.into())),
        BodyField::Limit => number(denying.map(|policy| policy.quota)),
        BodyField::Window => denying.map_or(FieldValue::Unknown, |policy| text(policy.window.to_string())),
        BodyField::Remaining => number(denying.map(|policy| policy.remaining)),
        BodyField::Reset => number(denying.filter(|policy| policy.has_reset()).map(|policy| policy.reset)),
        BodyField::RetryAfter => number(facts.retry_after),
        BodyField::DecisionId => facts.decision.map_or(FieldValue::Unknown, |id| text(id.to_string())),
    };
    template.render(value, out);
}

/// A minimal JSON writer.
struct Json<'o>(&'o mut Vec<u8>);

impl Json<'_> {
    /// Appends text that is JSON already or needs no escapes within a string.
    fn raw(&mut self, text: &str) -> &mut Self {
        self.0.extend_from_slice(text.as_bytes());
        self
    }

    fn number(&mut self, number: u64) -> &mut Self {
        self.raw(itoa::Buffer::new().format(number))
    }

    /// Appends formatted text without escapes. Writing to memory cannot fail.
    fn display(&mut self, value: impl std::fmt::Display) -> &mut Self {
        let _ = write!(self.0, "{value}");
        self
    }

    /// Appends arbitrary text as a JSON string.
    fn string(&mut self, text: &str) -> &mut Self {
        let _ = serde_json::to_writer(&mut *self.0, text);
        self
    }
}

/// Appends the members that every problem starts with.
fn begin(settings: &ResponseConfig, facts: &DecisionSummary<'_>, json: &mut Json<'_>) {
    let (kind, title) = match facts.disposition {
        Disposition::Unavailable => ("temporary-reduced-capacity", "Temporarily unavailable"),
        _ if facts.is_abnormal => ("abnormal-usage-detected", "Unusually many requests"),
        _ => ("quota-exceeded", "Over the limit"),
    };
    json.raw(r#"{"type":"https://iana.org/assignments/http-problem-types#"#).raw(kind);
    json.raw(r#"","title":""#).raw(title);
    json.raw(r#"","status":"#).raw(settings.status(facts).as_str());
}

/// A problem of at most 200 bytes; everything in it is of bounded length.
fn minimal(settings: &ResponseConfig, facts: &DecisionSummary<'_>, json: &mut Json<'_>) {
    begin(settings, facts, json);
    retry_after(facts, json);
    json.raw("}");
}

/// Appends when to retry, unless the request can never pass.
fn retry_after(facts: &DecisionSummary<'_>, json: &mut Json<'_>) {
    if let Some(wait) = facts.retry_after {
        json.raw(r#","retry_after":"#).number(wait);
    }
}

/// Appends what the request was about, and where its limits are described.
fn about(settings: &ResponseConfig, facts: &DecisionSummary<'_>, scope: Option<&str>, json: &mut Json<'_>) {
    if let Some(endpoint) = facts.scope.and_then(|scope| scope.endpoint.as_deref()) {
        json.raw(r#","endpoint":"#).string(endpoint);
    }
    if let Some(scope) = scope {
        json.raw(r#","scope":"#).string(scope);
    }
    if let Some(url) = &settings.documentation_url {
        json.raw(r#","documentation_url":"#).string(&url.0);
    }
}

/// Returns the identity whose counter denied the request.
fn identity<'f>(facts: &DecisionSummary<'f>) -> Option<&'f str> {
    facts.scope.and_then(|scope| scope.identity.as_deref())
}

fn problem(settings: &ResponseConfig, facts: &DecisionSummary<'_>, json: &mut Json<'_>) {
    begin(settings, facts, json);
    message(facts, json.raw(r#","detail":""#));
    json.raw("\"");
    retry_after(facts, json);
    if facts.disposition == Disposition::Denied {
        json.raw(r#","violated-policies":["#);
        for (at, policy) in facts.policies.iter().filter(|policy| policy.is_over).enumerate() {
            policy_name(policy, json.raw(if at == 0 { "\"" } else { ",\"" }));
            json.raw("\"");
        }
        json.raw("]");
    }
    if let Some(decision) = facts.decision {
        json.raw(r#","decision_id":""#).0.extend_from_slice(&decision.digits());
        json.raw("\"");
    }
    about(settings, facts, identity(facts), json);
    json.raw("}");
}

/// Appends the policy's name as it is written in the header fields.
fn policy_name(policy: &Policy<'_>, json: &mut Json<'_>) {
    for char in policy.rule.chars() {
        match char {
            '"' | '\\' => json.0.extend_from_slice(&[b'\\', char as u8]),
            ' '..='~' => json.0.push(char as u8),
            _ => json.0.push(b'?'),
        }
    }
    if policy.is_one_of_several {
        json.raw("/").display(policy.window);
    }
}

fn plain(settings: &ResponseConfig, facts: &DecisionSummary<'_>, json: &mut Json<'_>) {
    let code = if facts.disposition == Disposition::Denied { "RATE_LIMITED" } else { "UNAVAILABLE" };
    message(facts, json.raw(r#"{"error":{"code":""#).raw(code).raw(r#"","message":""#));
    json.raw("\"");
    retry_after(facts, json);
    if let Some(nearest) = facts.nearest() {
        json.raw(r#","limit":"#).number(nearest.quota);
        json.raw(r#","window":""#).display(nearest.window).raw("\"");
    }
    about(settings, facts, identity(facts).or(facts.denied_by), json);
    json.raw("}}");
}

fn message(facts: &DecisionSummary<'_>, json: &mut Json<'_>) {
    let is_over = facts.disposition == Disposition::Denied;
    let nearest = facts.nearest().filter(|_| is_over);
    json.raw(match (is_over, nearest) {
        (false, _) if facts.is_shed => "The service is overloaded and sheds requests. ",
        (false, _) => "The request could not be checked. ",
        (true, None) if facts.retry_after.is_none() => {
            "No limit is set for this request, and such requests are denied."
        }
        (true, _) => "Rate limit exceeded. ",
    });
    if let Some(nearest) = nearest {
        json.raw("At most ").number(nearest.quota);
        match nearest.window {
            Window::Concurrent => json.raw(" at once. "),
            window => json.raw(" in ").display(window).raw(". "),
        };
    }
    match (facts.retry_after, nearest) {
        (Some(wait), _) => {
            json.raw("Retry after ").number(wait).raw(if wait == 1 { " second." } else { " seconds." });
        }
        (None, Some(nearest)) if nearest.quota == 0 => {
            json.raw("No request can pass, now or later.");
        }
        (None, Some(_)) => {
            json.raw("A request of this cost can never pass; send a smaller cost.");
        }
        (None, None) => {}
    }
}
