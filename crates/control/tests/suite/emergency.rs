//! Emergency measures and grants: stored, replicated to all nodes, audited, and expiring on their own.

use crate::{START, open, operator, rules, until};
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::Duration;
use tollgate_control::{
    ControlError, ControlPlane, EmergencyRecord, EmergencySpec, SyncConfig, ValidationError,
};
use tollgate_core::{Clock, ManualClock, TimeDelta, Timestamp};
use tollgate_engine::{Check, Limiter, QuotaProvider, UsageOf};
use tollgate_store::{MemoryConfig, MemoryStore};

type Memory = MemoryStore<Arc<ManualClock>>;

fn limiter(control: &ControlPlane, clock: &Arc<ManualClock>) -> Limiter<Memory> {
    let store = MemoryStore::new(&MemoryConfig::with_bytes(1 << 20), Arc::clone(clock)).expect("a store");
    let time: Arc<dyn Clock> = Arc::clone(clock) as _;
    Limiter::new(rules(), store, time)
        .with_quotas(control.quota_table())
        .with_measures(control.active_measures())
}

async fn declare(control: &ControlPlane, sent: &Value) -> Result<EmergencyRecord, ValidationError> {
    let draft: EmergencySpec = serde_json::from_value(sent.clone()).expect("a draft");
    control.create_emergency(draft, &rules(), &operator()).await.expect("a database")
}

fn usage_of<'a>(attributes: &'a [(&'a str, &'a str)]) -> UsageOf<'a> {
    UsageOf { domain: None, key: "api_key", attributes, address: None, rule: None }
}

fn block(key: &str) -> Value {
    json!({"action": "block", "target": {"kind": "api_key", "value": key}, "reason": "abuse"})
}

fn blocked(limiter: &Limiter<Memory>, key: &str) -> Option<String> {
    let attributes = [("api_key", key)];
    let decision = pollster::block_on(limiter.check(&Check::attributes("d", &attributes)));
    decision.denied_by_name().map(str::to_owned)
}

pub(crate) async fn measures_are_active_until_they_end(address: String) {
    let (control, clock) = open(&address).await;
    let limiter = limiter(&control, &clock);
    let created = declare(&control, &block("attacker-with-a-key")).await.expect("a measure");
    assert_eq!(created.target.value, "atta…", "keys are masked to their first characters");
    assert_eq!(created.expires_at.as_deref(), Some("2026-01-01T01:00:00Z"), "an hour by default");
    let name = Some(format!("emergency:{}", created.id));
    assert_eq!(blocked(&limiter, "attacker-with-a-key"), name);
    assert_eq!(blocked(&limiter, "somebody-else"), None);
    let revision = control.revision();
    let at = |seconds: u64| clock.set(Timestamp::from_secs(START) + TimeDelta::from_secs(seconds));
    at(3_599);
    assert_eq!(blocked(&limiter, "attacker-with-a-key"), name);
    let renewed = control.renew_emergency(&created.id, Some(600), &operator()).await.expect("a database");
    assert_eq!(renewed.expect("renewed").expires_at.as_deref(), Some("2026-01-01T01:09:59Z"));
    at(3_600 + 598);
    assert_eq!(blocked(&limiter, "attacker-with-a-key"), name);
    at(3_600 + 599);
    assert_eq!(blocked(&limiter, "attacker-with-a-key"), None, "exactly on time, without a write");
    assert_eq!(control.revision(), revision + 1, "the renewal");
    assert!(control.emergencies().await.expect("an answer").is_empty());
    let late = control.renew_emergency(&created.id, None, &operator()).await;
    assert!(matches!(late, Err(ControlError::NotFound(_))), "{late:?}");
    control.catch_up().await.expect("an answer");
    assert!(!control.active_measures().any_active(), "a request looks at nothing any more");
    // Ended before its expiry.
    let again = declare(&control, &block("attacker-with-a-key")).await.expect("a measure");
    assert!(blocked(&limiter, "attacker-with-a-key").is_some());
    control.end_emergency(&again.id, &operator()).await.expect("an end");
    assert_eq!(blocked(&limiter, "attacker-with-a-key"), None);
    let actions: Vec<String> =
        control.audit(None, 100).await.expect("an answer").into_iter().map(|entry| entry.action).collect();
    assert_eq!(actions, ["emergency.end", "emergency.declare", "emergency.renew", "emergency.declare"]);
    assert!(matches!(
        control.verify_audit().await.expect("an answer"),
        tollgate_control::AuditVerification::Intact { entries: 4, .. }
    ));
}

pub(crate) async fn an_invalid_measure_is_rejected_with_its_field(address: String) {
    let (control, _) = open(&address).await;
    let with = |action: &str, kind: &str, value: &str| json!({"action": action, "target": {"kind": kind, "value": value}, "reason": "r"});
    let mut tight = with("tighten", "tenant", "t");
    tight["factor"] = json!(1.5);
    let mut long = with("block", "tenant", "t");
    long["ttl_seconds"] = json!(86_401);
    let mut vain = with("block", "tenant", "t");
    vain["factor"] = json!(0.5);
    for (sent, field) in [
        (with("block", "rule", "orders"), "target.kind"),
        (json!({"action": "block", "reason": "everybody?"}), "target.kind"),
        (with("allow_all", "tenant", "t"), "target.kind"),
        (with("disable_rule", "rule", "no such rule"), "target.value"),
        (with("block", "address", "10.0.0.1/8"), "target.value"),
        (with("block", "endpoint", "GET /*/x"), "target.value"),
        (with("block", "api_key", ""), "target.value"),
        (with("tighten", "tenant", "t"), "factor"),
        (tight, "factor"),
        (vain, "factor"),
        (long, "ttl_seconds"),
        (json!({"action": "shadow_all", "reason": ""}), "reason"),
        (with("block", "attribute", "u-1"), "target.key"),
        (
            json!({"action": "block", "target": {"kind": "tenant", "key": "x", "value": "t"}, "reason": "r"}),
            "target.key",
        ),
        (json!({"action": "allow_all", "reason": "r", "permanent": true}), "permanent"),
        (
            json!({"action": "exempt", "target": {"kind": "tenant", "value": "t"}, "reason": "r", "permanent": true, "ttl_seconds": 60}),
            "ttl_seconds",
        ),
    ] {
        let error = declare(&control, &sent).await.expect_err("invalid");
        assert_eq!(error.place, field, "{sent}: {error:?}");
    }
    let adapted = with("disable_rule", "rule", "overload/adapt");
    assert_eq!(
        declare(&control, &adapted).await.expect_err("no limit follows signals").place,
        "target.value"
    );
    assert!(control.audit(None, 10).await.expect("an answer").is_empty());
}

pub(crate) async fn measures_are_active_on_every_node(address: String) {
    let ((one, clock), (two, _)) = (open(&address).await, open(&address).await);
    let (here, there) = (limiter(&one, &clock), limiter(&two, &clock));
    // Only notifications can propagate changes: the poll interval is longer than the test.
    let times = SyncConfig { server: Duration::from_secs(3_600), ..SyncConfig::default() };
    let syncing =
        [tokio::spawn(Arc::clone(&one).run_sync(times)), tokio::spawn(Arc::clone(&two).run_sync(times))];
    declare(&one, &block("a-key-of-one")).await.expect("a measure");
    declare(&two, &block("a-key-of-two")).await.expect("a measure");
    until("both on both", || {
        [&here, &there]
            .iter()
            .all(|node| blocked(node, "a-key-of-one").is_some() && blocked(node, "a-key-of-two").is_some())
    })
    .await;
    let first = one.emergencies().await.expect("an answer");
    assert_eq!(first, two.emergencies().await.expect("an answer"));
    two.end_emergency(&first[0].id, &operator()).await.expect("an end");
    one.end_emergency(&first[1].id, &operator()).await.expect("an end");
    until("none on either", || !one.active_measures().any_active() && !two.active_measures().any_active())
        .await;
    syncing.iter().for_each(tokio::task::JoinHandle::abort);
    // A node that starts later knows the active measures.
    declare(&one, &json!({"action": "shadow_all", "reason": "bad rules"})).await.expect("a measure");
    assert!(open(&address).await.0.active_measures().any_active());
}

/// Clocks of nodes differ by at least some milliseconds, and changes propagate faster than that.
pub(crate) async fn a_revoked_grant_is_gone_despite_clock_skew(address: String) {
    let mut nodes = Vec::new();
    for ahead in [10, 0, 20] {
        let (node, clock) = open(&address).await;
        clock.advance(TimeDelta::from_secs(ahead));
        nodes.push((node, clock));
    }
    let sent = serde_json::from_value(json!({"units": 4, "reason": "a mistake"})).expect("a draft");
    let granted = nodes[0].0.grant("key", sent, &rules(), &operator()).await.expect("a database");
    let granted = granted.expect("a grant");
    let usable = async || {
        let mut usable = Vec::new();
        for (node, clock) in &nodes {
            node.catch_up().await.expect("an answer");
            usable.push(
                node.quota_table()
                    .lookup(&Check::attributes("d", &[("api_key", "key")]), &rules(), &**clock)
                    .grants
                    .is_some(),
            );
        }
        usable
    };
    assert_eq!(usable().await, [true; 3]);
    nodes[0].0.revoke_grant("key", &granted.id, &operator()).await.expect("revoked");
    assert_eq!(usable().await, [false; 3]);
}

pub(crate) async fn a_grant_is_used_once_on_top_of_the_limit(address: String) {
    let ((one, clock), (two, _)) = (open(&address).await, open(&address).await);
    let limiter = limiter(&one, &clock);
    let attributes = [("api_key", "a-good-customer")];
    let passes = async || {
        for passed in 0..20 {
            if !limiter.check(&Check::attributes("d", &attributes)).await.is_allowed() {
                return passed;
            }
        }
        20
    };
    assert_eq!(passes().await, 3);
    let draft = |sent: Value| serde_json::from_value(sent).expect("a draft");
    // Granted on another node, and replicated to this one.
    let sent = draft(json!({"units": 4, "reason": "ticket 7", "ttl_seconds": 86_400}));
    let granted = two.grant("a-good-customer", sent, &rules(), &operator()).await.expect("a database");
    let granted = granted.expect("a grant");
    assert_eq!((granted.rule.as_str(), granted.expires_at.as_str()), ("default", "2026-01-02T00:00:00Z"));
    one.catch_up().await.expect("an answer");
    assert_eq!(passes().await, 4);
    // Reading everything twice restores nothing.
    one.catch_up().await.expect("an answer");
    assert_eq!(passes().await, 0);
    clock.advance(TimeDelta::from_secs(60));
    assert_eq!(passes().await, 3, "the limit itself is unaffected");
    let usage = limiter.usage(&usage_of(&attributes)).await.expect("usage");
    assert_eq!((usage.grants[0].units, usage.grants[0].remaining), (4, Some(0)));
    for (sent, field) in [
        (json!({"units": 0, "reason": "r"}), "units"),
        (json!({"units": 1, "reason": ""}), "reason"),
        (json!({"units": 1, "reason": "r", "rule": "path"}), "rule"),
        (json!({"units": 1, "reason": "r", "ttl_seconds": 0}), "ttl_seconds"),
    ] {
        let rejected = one.grant("k", draft(sent.clone()), &rules(), &operator()).await.expect("a database");
        assert_eq!(rejected.expect_err("invalid").place, field, "{sent}");
    }

    // The rest of a grant can be revoked on any node; other callers' grants stay.
    let sent = || draft(json!({"units": 4, "reason": "a mistake"}));
    let wrong = two.grant("a-good-customer", sent(), &rules(), &operator()).await.expect("a database");
    let wrong = wrong.expect("a grant").id;
    two.grant("another", sent(), &rules(), &operator()).await.expect("a database").expect("a grant");
    one.catch_up().await.expect("an answer");
    assert!(limiter.check(&Check::attributes("d", &attributes)).await.is_allowed(), "one of four");
    for (key, id) in [("another", wrong.as_str()), ("a-good-customer", "nope")] {
        let rejected = two.revoke_grant(key, id, &operator()).await;
        assert!(matches!(rejected, Err(ControlError::NotFound(_))), "{rejected:?}");
    }
    two.revoke_grant("a-good-customer", &wrong, &operator()).await.expect("revoked");
    one.catch_up().await.expect("an answer");
    assert_eq!(passes().await, 0);
    assert!(matches!(
        one.revoke_grant("a-good-customer", &wrong, &operator()).await,
        Err(ControlError::NotFound(_))
    ));
    let of_another = limiter.usage(&usage_of(&[("api_key", "another")])).await.expect("usage");
    assert_eq!(of_another.grants.len(), 1);
    let entry = one.audit(None, 1).await.expect("an answer").remove(0);
    assert_eq!((entry.action.as_str(), entry.after.as_str()), ("usage.revoke", ""));
    assert!(entry.before.contains("a mistake"), "{}", entry.before);
    // A node that starts later does not know the grant at all.
    let (three, _) = open(&address).await;
    assert!(
        three
            .quota_table()
            .lookup(&Check::attributes("d", &attributes), &rules(), &*clock)
            .grants
            .is_none_or(|grants| { grants.iter().all(|grant| *grant.id != *wrong) })
    );

    let recorded = one.audit_reset("a-good-customer", None, "ticket 8", "{}".to_owned(), &operator()).await;
    recorded.expect("a database").expect("recorded");
    let entries = one.audit(None, 10).await.expect("an answer");
    let actions: Vec<(&str, &str)> =
        entries.iter().map(|entry| (entry.action.as_str(), entry.target.as_str())).collect();
    assert_eq!(actions[0].0, "usage.reset");
    assert_eq!(actions[1], ("usage.revoke", actions[0].1), "the same key, by its hash");
}
