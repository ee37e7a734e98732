//! Bodies of checks and reservations.

use super::head::RequestHead;
use crate::check_request::{CheckForm, CheckRequest, Pair};
use bytes::Bytes;
use std::collections::BTreeMap;
use std::fmt::Write;

/// What is checked, as the members of a JSON object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Subject {
    members: String,
    is_head: bool,
}

impl Subject {
    /// Attributes are sorted, so that the same ones are the same subject.
    pub(super) fn from_request(request: &CheckRequest) -> Self {
        let members = match &request.form {
            CheckForm::Attributes(pairs) => {
                let pairs: BTreeMap<&str, &str> =
                    pairs.iter().map(|(key, value)| (&**key, value.as_str())).collect();
                format!("\"attributes\":{}", json(&pairs))
            }
            CheckForm::Descriptors(all) => {
                let entries = |pairs: &Vec<Pair>| BTreeMap::from([("entries", pairs.clone())]);
                format!("\"descriptors\":{}", json(&all.iter().map(entries).collect::<Vec<_>>()))
            }
        };
        Self { members, is_head: false }
    }

    /// A request head, and attributes beside what identifies its caller.
    pub(super) fn head(head: &RequestHead, attributes: impl IntoIterator<Item = (String, String)>) -> Self {
        let attributes: BTreeMap<String, String> = attributes.into_iter().collect();
        let mut members = format!("\"request\":{}", json(head));
        if !attributes.is_empty() {
            members.push_str(&format!(",\"attributes\":{}", json(&attributes)));
        }
        Self { members, is_head: true }
    }

    /// Returns the key in the deny cache. Heads of one caller differ in fields that do not identify it, so a denial of one
    /// would not be found again.
    pub(super) fn cache_key(&self, is_reservation: bool) -> Option<String> {
        let kind = if is_reservation { "reserve " } else { "" };
        (!self.is_head).then(|| format!("{kind}{}", self.members))
    }
}

fn json(value: &impl serde::Serialize) -> String {
    // None of the types has keys that are not strings.
    serde_json::to_string(value).unwrap_or_else(|_| "null".to_owned())
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
