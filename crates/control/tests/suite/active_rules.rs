//! Quotas take effect on decisions.

use crate::{START, draft, open, operator, rules};
use serde_json::{Value, json};
use std::sync::Arc;
use tollgate_control::{ControlPlane, Precondition};
use tollgate_core::{Clock, ManualClock, TimeDelta, Timestamp};
use tollgate_engine::{Check, Limiter};
use tollgate_rules::Descriptor;
use tollgate_store::{MemoryConfig, MemoryStore};

pub(crate) type Memory = MemoryStore<Arc<ManualClock>>;

pub(crate) fn limiter(control: &ControlPlane, clock: &Arc<ManualClock>) -> Limiter<Memory> {
    let store = MemoryStore::new(&MemoryConfig::with_bytes(1 << 20), Arc::clone(clock)).expect("a store");
    let time: Arc<dyn Clock> = Arc::clone(clock) as _;
    Limiter::new(rules(), store, time).with_quotas(control.quota_table())
}

/// Returns how many requests in a row are allowed, up to twenty.
async fn passes(limiter: &Limiter<Memory>, request: &[(&str, &str)]) -> usize {
    for passed in 0..20 {
        if !limiter.check(&Check::attributes("d", request)).await.is_allowed() {
            return passed;
        }
    }
    20
}

pub(crate) async fn put(control: &ControlPlane, key: &str, sent: &Value) {
    let put = control.put_quota(key, draft(sent), &rules(), Precondition::Any, &operator()).await;
    put.expect("a database").unwrap_or_else(|problem| panic!("{problem:?}"));
}

pub(crate) async fn overrides_win_over_tiers_and_tiers_over_rules(address: String) {
    let (control, clock) = open(&address).await;
    let limiter = limiter(&control, &clock);
    put(&control, "tiered", &json!({"tier": "pro"})).await;
    let own = json!({"descriptor": "default", "requests_per_unit": 7, "unit": "minute"});
    put(&control, "own", &json!({"tier": "pro", "overrides": [own]})).await;
    let orders = json!({"descriptor": "endpoint:POST /orders", "requests_per_unit": 4, "unit": "10 minutes", "replace": "all"});
    put(&control, "orders", &json!({"tier": "pro", "overrides": [orders]})).await;
    put(
        &control,
        "shut",
        &json!({"overrides": [{"descriptor": "default", "requests_per_unit": 0, "unit": "day"}]}),
    )
    .await;
    assert_eq!(passes(&limiter, &[("api_key", "nobody")]).await, 3, "the rule's limit");
    assert_eq!(passes(&limiter, &[("api_key", "asks"), ("tier", "pro")]).await, 5, "the request's tier");
    assert_eq!(
        passes(&limiter, &[("api_key", "tiered"), ("tier", "free")]).await,
        5,
        "the quota's tier wins"
    );
    assert_eq!(passes(&limiter, &[("api_key", "own"), ("tier", "pro")]).await, 7);
    assert_eq!(passes(&limiter, &[("api_key", "orders"), ("endpoint", "POST /orders")]).await, 4);
    assert_eq!(
        passes(&limiter, &[("api_key", "orders"), ("endpoint", "GET /orders")]).await,
        1,
        "the rest of 5 by its tier"
    );
    assert_eq!(passes(&limiter, &[("api_key", "shut")]).await, 0);
    // The same through descriptors, as Envoy sends them.
    let entries = [("api_key", "own2")];
    put(
        &control,
        "own2",
        &json!({"overrides": [{"descriptor": "api_key", "requests_per_unit": 1, "unit": "hour", "replace": "all"}]}),
    )
    .await;
    let descriptors = [Descriptor { entries: &entries, ..Descriptor::default() }];
    let first = limiter.check(&Check::descriptors("d", &descriptors)).await;
    let second = limiter.check(&Check::descriptors("d", &descriptors)).await;
    assert!(first.is_allowed() && !second.is_allowed());
    let denied = second.limit(&second.limits[0]).expect("the limit");
    assert_eq!(denied.limit.to_string(), "gcra 1/1h");
    assert_eq!(second.denied_by_name(), Some("api_key"));
    // Deleted with immediate effect.
    control.delete_quota("own2", Precondition::Any, &operator()).await.expect("a deletion");
    assert!(limiter.check(&Check::descriptors("d", &descriptors)).await.is_allowed());
}

pub(crate) async fn times_take_effect_without_a_write(address: String) {
    let (control, clock) = open(&address).await;
    let limiter = limiter(&control, &clock);
    let own = json!({"descriptor": "default", "requests_per_unit": 9, "unit": "hour", "replace": "all"});
    let sent = json!({
        "overrides": [own], "effective_at": "2026-01-01T01:00:00Z", "expires_at": "2026-01-01T03:00:00Z",
    });
    put(&control, "timed", &sent).await;
    let revision = control.revision();
    let limit = async || {
        let decision = limiter.check(&Check::attributes("d", &[("api_key", "timed")])).await;
        decision.limit(&decision.limits[0]).expect("a limit").limit.rate().count
    };
    let at = |seconds: u64| clock.set(Timestamp::from_secs(START) + TimeDelta::from_secs(seconds));
    assert_eq!(limit().await, 3);
    at(3_599);
    assert_eq!(limit().await, 3);
    at(3_600);
    assert_eq!(limit().await, 9, "on the second");
    at(3 * 3_600 - 1);
    assert_eq!(limit().await, 9);
    at(3 * 3_600);
    assert_eq!(limit().await, 3, "on the second");
    assert_eq!(control.revision(), revision);
}

pub(crate) async fn a_changed_limit_keeps_the_usage(address: String) {
    let (control, clock) = open(&address).await;
    let limiter = limiter(&control, &clock);
    let request = [("api_key", "used")];
    assert_eq!(passes(&limiter, &request).await, 3);
    let own = |count: u64| json!({"overrides": [{"descriptor": "default", "requests_per_unit": count, "unit": "minute"}]});
    put(&control, "used", &own(10)).await;
    assert_eq!(
        passes(&limiter, &request).await,
        7,
        "a higher limit has its room at once, less what was used"
    );
    clock.advance(TimeDelta::from_secs(30));
    assert_eq!(passes(&limiter, &request).await, 5, "refilled at the higher rate");
    put(&control, "used", &own(2)).await;
    assert_eq!(passes(&limiter, &request).await, 0);
    clock.advance(TimeDelta::from_secs(30));
    assert_eq!(passes(&limiter, &request).await, 0, "5 units are still used, of 2");
    clock.advance(TimeDelta::from_secs(24));
    assert_eq!(
        passes(&limiter, &request).await,
        1,
        "used units return at the rate under which they were used"
    );
}
