//! What operators decide in an emergency: kept, told to all nodes, remembered, and over by itself.

use crate::{START, open, rules, somebody, until};
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::Duration;
use tollgate_control::{
    ControlError, ControlPlane, EmergencyRecord, EmergencySpec, SyncConfig, ValidationError,
};
use tollgate_core::{Clock, ManualClock, TimeDelta, Timestamp};
use tollgate_engine::{Check, Limiter, QuotaProvider};
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
    control.create_emergency(draft, &rules(), &somebody()).await.expect("a database")
}

fn block(key: &str) -> Value {
    json!({"action": "block", "target": {"kind": "api_key", "value": key}, "reason": "abuse"})
}

fn blocked(limiter: &Limiter<Memory>, key: &str) -> Option<String> {
    let attributes = [("api_key", key)];
    let decision = pollster::block_on(limiter.check(&Check::attributes("d", &attributes)));
    decision.denied_by_name().map(str::to_owned)
}

pub(crate) async fn measures_act_until_they_end(address: String) {
    let (control, clock) = open(&address).await;
    let limiter = limiter(&control, &clock);
    let declared = declare(&control, &block("attacker-with-a-key")).await.expect("a measure");
    assert_eq!(declared.target.value, "atta…", "keys are told by their first characters");
    assert_eq!(declared.expires_at, "2026-01-01T01:00:00Z", "an hour unless it says otherwise");
    let name = Some(format!("emergency:{}", declared.id));
    assert_eq!(blocked(&limiter, "attacker-with-a-key"), name);
    assert_eq!(blocked(&limiter, "somebody-else"), None);
    let revision = control.revision();
    let at = |seconds: u64| clock.set(Timestamp::from_secs(START) + TimeDelta::from_secs(seconds));
    at(3_599);
    assert_eq!(blocked(&limiter, "attacker-with-a-key"), name);
    let renewed = control.renew_emergency(&declared.id, Some(600), &somebody()).await.expect("a database");
    assert_eq!(renewed.expect("renewed").expires_at, "2026-01-01T01:09:59Z");
    at(3_600 + 598);
    assert_eq!(blocked(&limiter, "attacker-with-a-key"), name);
    at(3_600 + 599);
    assert_eq!(blocked(&limiter, "attacker-with-a-key"), None, "on the second, without a write");
    assert_eq!(control.revision(), revision + 1, "the renewal");
    assert!(control.emergencies().await.expect("an answer").is_empty());
    let late = control.renew_emergency(&declared.id, None, &somebody()).await;
    assert!(matches!(late, Err(ControlError::NotFound(_))), "{late:?}");
    control.catch_up().await.expect("an answer");
    assert!(!control.active_measures().any_active(), "a request looks at nothing any more");
    // Ended before its time.
    let again = declare(&control, &block("attacker-with-a-key")).await.expect("a measure");
    assert!(blocked(&limiter, "attacker-with-a-key").is_some());
    control.end_emergency(&again.id, &somebody()).await.expect("an end");
    assert_eq!(blocked(&limiter, "attacker-with-a-key"), None);
    let actions: Vec<String> =
        control.audit(None, 100).await.expect("an answer").into_iter().map(|entry| entry.action).collect();
    assert_eq!(actions, ["emergency.end", "emergency.declare", "emergency.renew", "emergency.declare"]);
    assert!(matches!(
        control.verify_audit().await.expect("an answer"),
        tollgate_control::AuditVerification::Intact { entries: 4, .. }
    ));
}

pub(crate) async fn what_cannot_be_a_measure_is_refused_and_says_where(address: String) {
    let (control, _) = open(&address).await;
    let with = |action: &str, kind: &str, value: &str| json!({"action": action, "target": {"kind": kind, "value": value}, "reason": "r"});
    let mut tight = with("tighten", "tenant", "t");
    tight["factor"] = json!(1.5);
    let mut long = with("block", "tenant", "t");
    long["ttl_seconds"] = json!(86_401);
    let mut vain = with("block", "tenant", "t");
    vain["factor"] = json!(0.5);
    for (sent, place) in [
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
    ] {
        let refused = declare(&control, &sent).await.expect_err("it cannot act");
        assert_eq!(refused.place, place, "{sent}: {refused:?}");
    }
    assert!(control.audit(None, 10).await.expect("an answer").is_empty());
}

pub(crate) async fn measures_act_on_every_node(address: String) {
    let ((one, clock), (two, _)) = (open(&address).await, open(&address).await);
    let (here, there) = (limiter(&one, &clock), limiter(&two, &clock));
    // A server's pushes must do: nobody asks within the test's time.
    let times = SyncConfig { server: Duration::from_secs(3_600), ..SyncConfig::default() };
    let following =
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
    two.end_emergency(&first[0].id, &somebody()).await.expect("an end");
    one.end_emergency(&first[1].id, &somebody()).await.expect("an end");
    until("none on either", || !one.active_measures().any_active() && !two.active_measures().any_active())
        .await;
    following.iter().for_each(tokio::task::JoinHandle::abort);
    // A node that starts later knows what is on.
    declare(&one, &json!({"action": "shadow_all", "reason": "bad rules"})).await.expect("a measure");
    assert!(open(&address).await.0.active_measures().any_active());
}

/// Clocks of nodes differ by some milliseconds at least, and a word goes around faster than that.
pub(crate) async fn what_is_taken_back_is_gone_where_the_clock_is_behind_or_ahead(address: String) {
    let mut nodes = Vec::new();
    for ahead in [10, 0, 20] {
        let (node, clock) = open(&address).await;
        clock.advance(TimeDelta::from_secs(ahead));
        nodes.push((node, clock));
    }
    let sent = serde_json::from_value(json!({"units": 4, "reason": "a mistake"})).expect("a draft");
    let granted = nodes[0].0.grant("key", sent, &rules(), &somebody()).await.expect("a database");
    let granted = granted.expect("a grant");
    let usable = async || {
        let mut usable = Vec::new();
        for (node, clock) in &nodes {
            node.catch_up().await.expect("an answer");
            usable.push(node.quota_table().lookup("key", &rules(), &**clock).grants.is_some());
        }
        usable
    };
    assert_eq!(usable().await, [true; 3]);
    nodes[0].0.revoke_grant("key", &granted.id, &somebody()).await.expect("taken back");
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
    // Granted on another node: this one learns of it.
    let sent = draft(json!({"units": 4, "reason": "ticket 7", "ttl_seconds": 86_400}));
    let granted = two.grant("a-good-customer", sent, &rules(), &somebody()).await.expect("a database");
    let granted = granted.expect("a grant");
    assert_eq!((granted.rule.as_str(), granted.expires_at.as_str()), ("default", "2026-01-02T00:00:00Z"));
    one.catch_up().await.expect("an answer");
    assert_eq!(passes().await, 4);
    // A look at all there is, twice: nothing comes back.
    one.catch_up().await.expect("an answer");
    assert_eq!(passes().await, 0);
    clock.advance(TimeDelta::from_secs(60));
    assert_eq!(passes().await, 3, "the limit goes on as ever");
    let usage = limiter.usage(None, &attributes, None).await.expect("usage");
    assert_eq!((usage.grants[0].units, usage.grants[0].remaining), (4, Some(0)));
    for (sent, place) in [
        (json!({"units": 0, "reason": "r"}), "units"),
        (json!({"units": 1, "reason": ""}), "reason"),
        (json!({"units": 1, "reason": "r", "rule": "path"}), "rule"),
        (json!({"units": 1, "reason": "r", "ttl_seconds": 0}), "ttl_seconds"),
    ] {
        let refused = one.grant("k", draft(sent.clone()), &rules(), &somebody()).await.expect("a database");
        assert_eq!(refused.expect_err("it cannot act").place, place, "{sent}");
    }

    // What is left of one can be taken back, on any node; what others were granted stays.
    let sent = || draft(json!({"units": 4, "reason": "a mistake"}));
    let wrong = two.grant("a-good-customer", sent(), &rules(), &somebody()).await.expect("a database");
    let wrong = wrong.expect("a grant").id;
    two.grant("another", sent(), &rules(), &somebody()).await.expect("a database").expect("a grant");
    one.catch_up().await.expect("an answer");
    assert!(limiter.check(&Check::attributes("d", &attributes)).await.is_allowed(), "one of four");
    for (key, id) in [("another", wrong.as_str()), ("a-good-customer", "nope")] {
        let refused = two.revoke_grant(key, id, &somebody()).await;
        assert!(matches!(refused, Err(ControlError::NotFound(_))), "{refused:?}");
    }
    two.revoke_grant("a-good-customer", &wrong, &somebody()).await.expect("taken back");
    one.catch_up().await.expect("an answer");
    assert_eq!(passes().await, 0);
    assert!(matches!(
        one.revoke_grant("a-good-customer", &wrong, &somebody()).await,
        Err(ControlError::NotFound(_))
    ));
    let of_another = limiter.usage(None, &[("api_key", "another")], None).await.expect("usage");
    assert_eq!(of_another.grants.len(), 1);
    let entry = one.audit(None, 1).await.expect("an answer").remove(0);
    assert_eq!((entry.action.as_str(), entry.after.as_str()), ("usage.revoke", ""));
    assert!(entry.before.contains("a mistake"), "{}", entry.before);
    // A node that starts later does not know of it at all.
    let (three, _) = open(&address).await;
    assert!(
        three
            .quota_table()
            .lookup("a-good-customer", &rules(), &*clock)
            .grants
            .is_none_or(|grants| { grants.iter().all(|grant| *grant.id != *wrong) })
    );

    let noted = one.audit_reset("a-good-customer", None, "ticket 8", "{}".to_owned(), &somebody()).await;
    noted.expect("a database").expect("noted");
    let entries = one.audit(None, 10).await.expect("an answer");
    let told: Vec<(&str, &str)> =
        entries.iter().map(|entry| (entry.action.as_str(), entry.target.as_str())).collect();
    assert_eq!(told[0].0, "usage.reset");
    assert_eq!(told[1], ("usage.revoke", told[0].1), "of the same key, told by its hash");
}
