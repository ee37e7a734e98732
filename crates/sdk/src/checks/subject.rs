//! What is checked, as the HTTP API reads it, and as the deny cache finds it again.

use crate::check_request::{CheckForm, CheckRequest, Pair};
use std::collections::BTreeMap;

/// What is checked, as the members of a JSON object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Subject {
    pub(crate) members: String,
    pub(crate) is_head: bool,
}

impl Subject {
    /// Attributes are sorted, so that the same ones are the same subject.
    pub(crate) fn from_request(request: &CheckRequest) -> Self {
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

    /// Returns the key in the deny cache. Heads of one caller differ in fields that do not identify it, so a denial of one
    /// would not be found again.
    pub(crate) fn cache_key(&self, is_reservation: bool) -> Option<String> {
        let kind = if is_reservation { "reserve " } else { "" };
        (!self.is_head).then(|| format!("{kind}{}", self.members))
    }
}

/// Returns a value as JSON.
pub(crate) fn json(value: &impl serde::Serialize) -> String {
    // None of the types has keys that are not strings.
    serde_json::to_string(value).unwrap_or_else(|_| "null".to_owned())
}
