//! Bodies of checks and reservations.

use super::head::RequestHead;
use crate::checks::{Subject, json};
use bytes::Bytes;
use std::collections::BTreeMap;
use std::fmt::Write;

impl Subject {
    /// A request head, and attributes beside what identifies its caller.
    pub(super) fn head(head: &RequestHead, attributes: impl IntoIterator<Item = (String, String)>) -> Self {
        let attributes: BTreeMap<String, String> = attributes.into_iter().collect();
        let mut members = format!("\"request\":{}", json(head));
        if !attributes.is_empty() {
            members.push_str(&format!(",\"attributes\":{}", json(&attributes)));
        }
        Self { members, is_head: true }
    }
}

/// The body of a check or a reservation.
#[derive(Clone, Debug)]
pub(super) struct CheckBody<'a> {
    pub(super) domain: &'a str,
    pub(super) subject: &'a Subject,
    pub(super) cost: u64,
    /// Time after which a reservation stands, in milliseconds.
    pub(super) deadline_ms: Option<u64>,
    /// Identifies one reservation to all servers that are asked for it.
    pub(super) idempotency_key: Option<&'a str>,
}

impl<'a> CheckBody<'a> {
    /// A check of one unit.
    pub(super) const fn new(domain: &'a str, subject: &'a Subject) -> Self {
        Self { domain, subject, cost: 1, deadline_ms: None, idempotency_key: None }
    }

    pub(super) fn encode(&self) -> Bytes {
        let mut body = format!("{{\"domain\":{},{}", json(&self.domain), self.subject.members);
        if self.cost != 1 {
            let _ = write!(body, ",\"cost\":{}", self.cost);
        }
        if let Some(millis) = self.deadline_ms {
            let _ = write!(body, ",\"deadline_ms\":{millis}");
        }
        if let Some(key) = self.idempotency_key {
            let _ = write!(body, ",\"idempotency_key\":{}", json(&key));
        }
        body.push('}');
        body.into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check_request::CheckRequest;
    use serde_json::{Value, json};

    #[test]
    fn bodies_have_what_the_http_api_reads() {
        let request = CheckRequest::attributes([("user", "an\"n"), ("tenant", "acme")]);
        let subject = Subject::from_request(&request);
        let body = CheckBody {
            cost: 0,
            deadline_ms: Some(5),
            idempotency_key: Some("k\\"),
            ..CheckBody::new("shop", &subject)
        };
        let body: Value = serde_json::from_slice(&body.encode()).expect("JSON");
        let expected = json!({
            "domain": "shop", "attributes": {"user": "an\"n", "tenant": "acme"}, "cost": 0, "deadline_ms": 5,
            "idempotency_key": "k\\",
        });
        assert_eq!(body, expected);
        let other = CheckRequest::attributes([("tenant", "acme"), ("user", "an\"n")]);
        assert_eq!(Subject::from_request(&other), subject, "the order of attributes means nothing");
        assert_ne!(subject.cache_key(true), subject.cache_key(false));

        let request = CheckRequest::descriptors([vec![("a", "1"), ("b", "2")], vec![("c", "3")]]);
        let subject = Subject::from_request(&request);
        let body: Value = serde_json::from_slice(&CheckBody::new("shop", &subject).encode()).expect("JSON");
        let entries = json!([{"entries": [["a", "1"], ["b", "2"]]}, {"entries": [["c", "3"]]}]);
        assert_eq!(body, json!({"domain": "shop", "descriptors": entries}));
    }
}
