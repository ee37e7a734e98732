//! Node records: the heartbeat rows of nodes, and which of several rows with the same name count.

use serde_json::{Map, Value};

/// Age at which a node is stale, in milliseconds: it missed three heartbeats in a row.
pub(crate) const STALE: i64 = 16_000;

/// A node's heartbeat.
#[derive(Clone, Debug, PartialEq)]
pub struct NodeRecord {
    /// Id of the process.
    pub instance: String,
    /// Whether this is the current process.
    pub is_self: bool,
    /// Age of the heartbeat, in milliseconds.
    pub age_millis: i64,
    /// Whether the next heartbeat is overdue.
    pub stale: bool,
    /// Contents of the heartbeat.
    pub report: Map<String, Value>,
}

impl NodeRecord {
    pub(crate) fn name(&self) -> &str {
        self.report.get("name").and_then(Value::as_str).unwrap_or_default()
    }
}

/// For each name, returns the live nodes; if there are none, the one seen last.
pub(crate) fn latest(mut seen: Vec<NodeRecord>) -> Vec<NodeRecord> {
    seen.sort_by(|a, b| (a.name(), a.age_millis).cmp(&(b.name(), b.age_millis)));
    let mut nodes: Vec<NodeRecord> = Vec::new();
    for node in seen {
        let before = nodes.last().is_some_and(|before| before.name() == node.name());
        if !(before && node.stale) {
            nodes.push(node);
        }
    }
    nodes
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_restarted_node_is_listed_once() {
        let seen = |name: &str, age_millis: i64| {
            let report = json!({"name": name}).as_object().cloned().unwrap_or_default();
            NodeRecord {
                instance: String::new(),
                is_self: false,
                age_millis,
                stale: age_millis > STALE,
                report,
            }
        };
        let all =
            vec![seen("b", 90_000), seen("a", 10), seen("b", 20_000), seen("a", 4_000), seen("a", 30_000)];
        let ages: Vec<i64> = latest(all).iter().map(|node| node.age_millis).collect();
        assert_eq!(ages, [10, 4_000, 20_000], "two live nodes with one name; the last of a stale one");
    }
}
