//! Deprecated keys in the file of `--config`: still accepted (as serde aliases), with a warning.

use serde_json::Value;

/// Former and present paths of keys, outer before inner.
pub(super) const RENAMED: [(&str, &str); 16] = [
    ("who", "identity"),
    ("answers", "responses"),
    ("gateway.callers", "gateway.clients"),
    ("gateway.callers.held", "gateway.clients.max_delayed"),
    ("gateway.clients.held", "gateway.clients.max_delayed"),
    ("forward_auth.hold_ms", "forward_auth.max_delay_ms"),
    ("forward_auth.held", "forward_auth.max_delayed"),
    ("leases.most", "leases.max_keys"),
    ("decision_log.allowed", "decision_log.allowed_sample"),
    ("decision_log.hide", "decision_log.mask"),
    ("decision_log.hidden_as", "decision_log.mask_style"),
    ("guardrails.confirm_over", "guardrails.confirm_threshold"),
    ("guardrails.approval_over", "guardrails.approval_threshold"),
    ("guardrails.rollback_rise", "guardrails.rollback_factor"),
    ("guardrails.rollback_for_ms", "guardrails.rollback_sustain_ms"),
    ("guardrails.rollback_within_ms", "guardrails.rollback_window_ms"),
];

/// Returns the former keys that a file uses, with their present names.
pub(super) fn find(text: &str) -> Vec<(&'static str, &'static str)> {
    // The typed reader has accepted the file already.
    let Ok(file) = serde_saphyr::from_str::<Value>(text) else { return Vec::new() };
    let is_set = |path: &str| path.split('.').try_fold(&file, |value, key| value.get(key)).is_some();
    RENAMED.into_iter().filter(|(old, _)| is_set(old)).collect()
}

#[cfg(test)]
mod tests {
    use super::find;

    #[test]
    fn former_keys_are_found_at_their_place_only() {
        let text =
            "who: {trusted: []}\nidentity: {who: 1}\ngateway: {callers: {held: 1}}\nleases: {most: 5}\n";
        let found: Vec<&str> = find(text).into_iter().map(|(old, _)| old).collect();
        assert_eq!(found, ["who", "gateway.callers", "gateway.callers.held", "leases.most"]);
        assert!(find("identity: {}\nleases: {max_keys: 5}\nmost: 1\n").is_empty());
    }
}
