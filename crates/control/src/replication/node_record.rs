//! A node as the others know it: the row that it writes of itself, and which of several rows counts.

use serde_json::{Map, Value};

/// A node that has been silent for so long is stale: three times in a row it could not tell. In milliseconds.
pub(crate) const STALE: i64 = 16_000;

/// A node that has told of itself.
#[derive(Clone, Debug, PartialEq)]
pub struct NodeRecord {
    /// Which process it is.
    pub instance: String,
    /// Whether it is this process.
    pub is_self: bool,
    /// How long ago it told, in milliseconds.
    pub age_millis: i64,
    /// Whether it should have told again by now.
    pub stale: bool,
    /// What it told.
    pub report: Map<String, Value>,
}

impl NodeRecord {
    pub(crate) fn name(&self) -> &str {
        self.report.get("name").and_then(Value::as_str).unwrap_or_default()
    }
}

/// Of those that are called alike, the ones that are there; else the one that was last.
pub(crate) fn latest(mut seen: Vec<NodeRecord>) -> Vec<NodeRecord> {
    seen.sort_by(|a, b| (a.name(), a.age_millis).cmp(&(b.name(), b.age_millis)));
    let mut kept: Vec<NodeRecord> = Vec::new();
    for node in seen {
        let before = kept.last().is_some_and(|before| before.name() == node.name());
        if !(before && node.stale) {
            kept.push(node);
        }
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_restarted_node_is_listed_once() {
        let seen = |name: &str, age_millis: i64| {
            let told = json!({"name": name}).as_object().cloned().unwrap_or_default();
            NodeRecord {
                instance: String::new(),
                is_self: false,
                age_millis,
                stale: age_millis > STALE,
                report: told,
            }
        };
        let all =
            vec![seen("b", 90_000), seen("a", 10), seen("b", 20_000), seen("a", 4_000), seen("a", 30_000)];
        let ages: Vec<i64> = latest(all).iter().map(|node| node.age_millis).collect();
        assert_eq!(
            ages,
            [10, 4_000, 20_000],
            "two of one name that are both there; the last of one that is gone"
        );
    }
}
