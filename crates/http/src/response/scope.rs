//! What a limit counted: the endpoint and the identity whose counter denied a request, for its body, and an opaque name
//! of that counter. Computed only where it is sent, from the request's own attributes, with possible secrets masked.

use super::{BodyFormat, DecisionSummary, ResponseConfig};
use ring::digest;
use tollgate_core::secret_prefix;
use tollgate_engine::{CheckInput, Decision, LimitStatus};
use tollgate_rules::may_be_secret;

/// Maximum length of a value, in characters; longer ones are cut.
const MAX_VALUE: usize = 80;

/// What the limit that a response reports has counted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RequestScope {
    /// The endpoint of the request.
    pub(super) endpoint: Option<String>,
    /// The identity of the denying counter: `api_key:sk_l…:endpoint:POST /login`.
    pub(super) identity: Option<String>,
    /// An opaque name of the counter nearest exhaustion.
    pub(super) bucket: Option<String>,
}

impl ResponseConfig {
    /// Returns what to report about the request of a decision; `None` if these settings report nothing.
    #[must_use]
    pub fn scope(&self, decision: &Decision, input: CheckInput<'_>) -> Option<Box<RequestScope>> {
        let has_body = !decision.is_allowed() && self.body != BodyFormat::Minimal;
        if !has_body && !self.bucket {
            return None;
        }
        let mut scope = RequestScope::default();
        if has_body {
            let denying = decision.denying_limit();
            let entries = entries(input, denying);
            scope.endpoint = value(entries, "endpoint").map(|endpoint| shown("endpoint", endpoint));
            scope.identity = denying.map(|status| identity(decision, status, entries));
            scope.identity = scope.identity.filter(|identity| !identity.is_empty());
        }
        if self.bucket {
            let facts = DecisionSummary::from_decision(decision);
            let nearest = facts.nearest_rate().or(facts.nearest()).map(|policy| policy.rule);
            let mut named =
                decision.limits.iter().filter(|status| Some(decision.limit_name(status)) == nearest);
            // A rule may have matched several descriptors, each with a counter.
            let status =
                decision.denying_limit().filter(|denying| named.clone().any(|status| status == *denying));
            let status = status.or_else(|| named.next());
            scope.bucket = status.map(|status| bucket(decision, status, entries(input, Some(status))));
        }
        Some(Box::new(scope))
    }
}

type Entries<'e> = &'e [(&'e str, &'e str)];

/// Returns the attributes, or the entries of the descriptor that the limit matched.
fn entries<'e>(input: CheckInput<'e>, status: Option<&LimitStatus>) -> Entries<'e> {
    match input {
        CheckInput::Attributes(attributes) => attributes,
        CheckInput::Descriptors(descriptors) => {
            let at = status.map_or(0, |status| usize::from(status.descriptor));
            descriptors.get(at).map_or(&[], |descriptor| descriptor.entries)
        }
    }
}

fn value<'e>(entries: Entries<'e>, key: &str) -> Option<&'e str> {
    entries.iter().find(|(name, _)| *name == key).map(|(_, value)| *value)
}

/// Returns the keys of a limit's counter with their values, as far as the request has them.
fn parts<'e>(
    decision: &'e Decision,
    status: &LimitStatus,
    entries: Entries<'e>,
) -> impl Iterator<Item = (&'e str, &'e str)> {
    let rule = status.rule.and_then(|id| decision.rules().rule(id));
    let named = rule.into_iter().flat_map(|rule| rule.keys.iter());
    let named = named.filter_map(move |key| Some((&**key, value(entries, key)?)));
    // An inline limit counts its whole descriptor.
    named.chain(entries.iter().copied().filter(move |_| rule.is_none()))
}

fn identity(decision: &Decision, status: &LimitStatus, entries: Entries<'_>) -> String {
    let mut text = String::new();
    for (key, value) in parts(decision, status, entries) {
        if !text.is_empty() {
            text.push(':');
        }
        text.push_str(key);
        text.push(':');
        text.push_str(&shown(key, value));
    }
    text
}

/// Returns a value as it may be shown: masked if it may be a secret, and cut if it is long.
fn shown(key: &str, value: &str) -> String {
    let text = if may_be_secret(key) { secret_prefix(value) } else { value };
    let end = text.char_indices().nth(MAX_VALUE).map_or(text.len(), |(at, _)| at);
    let mark = if end < value.len() { "…" } else { "" };
    format!("{}{mark}", &text[..end])
}

/// Returns a name that two requests share exactly if they share the counter; it reveals none of the values.
fn bucket(decision: &Decision, status: &LimitStatus, entries: Entries<'_>) -> String {
    let mut context = digest::Context::new(&digest::SHA256);
    let mut add = |text: &str| {
        context.update(&(text.len() as u64).to_le_bytes());
        context.update(text.as_bytes());
    };
    add(decision.limit_name(status));
    for (key, value) in parts(decision, status, entries) {
        add(key);
        add(value);
    }
    let mut name = Vec::with_capacity(16);
    crate::hex::put(&mut name, &context.finish().as_ref()[..8]);
    // Hexadecimal digits are ASCII.
    String::from_utf8(name).unwrap_or_default()
}
