//! How cells share a limit, as `explain` and `usage` print it.

use crate::admin_client::cell;
use serde_json::Value;

/// Returns what the admin API says about a limit's `region` in words; `None` if there is one cell.
pub(crate) fn sentence(region: &Value) -> Option<String> {
    let mode = region["mode"].as_str()?;
    let mut text = format!("region {mode}");
    if let Some(owner) = region["owner"].as_str() {
        let here = if region["decided_here"] == true { ", this cell" } else { "" };
        text.push_str(&format!(" (decided by {owner}{here})"));
    } else if region["decided_here"] == false {
        text.push_str(" (no cell can decide)");
    }
    if region["used_by_others"].is_u64() {
        text.push_str(&format!(", {} used by other cells", cell(&region["used_by_others"])));
    }
    // What silent cells know is of no lag: they have not answered.
    match region["regional_only"] == true {
        true if region["part"].is_u64() => {
            let part = cell(&region["part"]);
            text.push_str(&format!(", regional only: other cells are silent, part {part}"));
        }
        true => text.push_str(", regional only: other cells are silent"),
        false => text.push_str(&format!(", lag {} ms", cell(&region["lag_ms"]))),
    }
    Some(text)
}

#[cfg(test)]
mod tests {
    use super::sentence;
    use serde_json::{Value, json};

    #[test]
    fn each_mode_reads_as_a_sentence() {
        assert_eq!(sentence(&Value::Null), None);
        let shared = json!({"mode": "shared", "decided_here": true, "lag_ms": 210, "regional_only": true, "part": 30, "used_by_others": 40});
        assert_eq!(
            sentence(&shared).as_deref(),
            Some("region shared, 40 used by other cells, regional only: other cells are silent, part 30")
        );
        let owner = json!({"mode": "owner", "owner": "eu", "decided_here": false, "lag_ms": 0, "regional_only": false});
        assert_eq!(sentence(&owner).as_deref(), Some("region owner (decided by eu), lag 0 ms"));
    }
}
