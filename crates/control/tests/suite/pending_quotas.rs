//! Pending quotas: until they take effect, the current terms apply.

use crate::active_rules::{Memory, limiter, put};
use crate::bulk::{as_line, export, import};
use crate::{START, open, operator};
use serde_json::{Value, json};
use tollgate_control::{ControlPlane, Precondition};
use tollgate_core::{ManualClock, TimeDelta, Timestamp};
use tollgate_engine::{Check, Limiter};

/// Returns a quota of `count` per minute that takes effect at a time of day.
fn later(count: u64, hours: &str) -> Value {
    let own = json!({"descriptor": "default", "requests_per_unit": count, "unit": "minute"});
    json!({"overrides": [own], "effective_at": format!("2026-01-01T{hours}:00Z")})
}

fn at(clock: &ManualClock, hours: u64, minutes: u64) {
    clock.set(Timestamp::from_secs(START) + TimeDelta::from_secs(hours * 3_600 + minutes * 60));
}

/// Returns a caller's limit per minute: three by the rule, five on the tier `pro`.
async fn limit(limiter: &Limiter<Memory>, key: &str) -> u64 {
    let decision = limiter.check(&Check::attributes("d", &[("api_key", key)])).await;
    decision.limit(&decision.limits[0]).expect("a limit").limit.rate().count
}

/// Returns the terms in effect until then, as the API reports them.
async fn until(control: &ControlPlane, key: &str) -> Option<Value> {
    let quota = control.quota(key).await.expect("an answer").expect("a quota");
    quota.until_effective.map(|until| json!(until))
}

pub(crate) async fn current_terms_stay_until_the_new_take_effect(address: String) {
    let (control, clock) = open(&address).await;
    let limiter = limiter(&control, &clock);
    let pro = json!({"tier": "pro", "overrides": [], "expires_at": null});
    for key in ["moves", "ends", "now"] {
        put(&control, key, &json!({"tier": "pro"})).await;
        put(&control, key, &later(9, "01:00")).await;
        assert_eq!(until(&control, key).await, Some(pro.clone()), "both are reported");
        assert_eq!(limit(&limiter, key).await, 5, "a pending quota changes nothing yet");
    }
    // Replacing or deleting the quota ends both, pending and current terms.
    control.delete_quota("ends", Precondition::Any, &operator()).await.expect("an end");
    assert_eq!(limit(&limiter, "ends").await, 3);
    put(&control, "ends", &later(9, "01:00")).await;
    assert_eq!(
        (until(&control, "ends").await, limit(&limiter, "ends").await),
        (None, 3),
        "deleted terms do not return"
    );
    put(&control, "now", &json!({"tier": "free"})).await;
    assert_eq!((until(&control, "now").await, limit(&limiter, "now").await), (None, 3));
    // A pending quota is replaced, and the current terms keep their own expiry.
    put(&control, "twice", &json!({"tier": "pro", "expires_at": "2026-01-01T02:00:00Z"})).await;
    put(&control, "twice", &later(9, "03:00")).await;
    put(&control, "twice", &later(7, "02:30")).await;
    let listed = control.export(None).await.expect("a list");
    assert_eq!(listed.iter().filter(|quota| quota.until_effective.is_some()).count(), 2);

    // A node that starts later has all of it.
    let revision = control.revision();
    let (other, _) = open(&address).await;
    let elsewhere = crate::active_rules::limiter(&other, &clock);
    for (hours, minutes, moves, twice) in
        [(0, 59, 5, 5), (1, 0, 9, 5), (1, 59, 9, 5), (2, 0, 9, 3), (2, 30, 9, 7), (3, 0, 9, 7)]
    {
        at(&clock, hours, minutes);
        for limiter in [&limiter, &elsewhere] {
            let now = (limit(limiter, "moves").await, limit(limiter, "twice").await);
            assert_eq!(now, (moves, twice), "at {hours}:{minutes:02}");
        }
    }
    assert_eq!(until(&control, "moves").await, None, "past terms are not reported");
    assert_eq!(control.revision(), revision, "without a write");
}

pub(crate) async fn imports_keep_current_terms_too(address: String) {
    let (control, clock) = open(&address).await;
    let limiter = limiter(&control, &clock);
    let line = |key: &str, mut sent: Value| {
        sent["api_key"] = key.into();
        sent
    };
    put(&control, "put", &json!({"tier": "pro"})).await;
    put(&control, "again", &json!({"tier": "pro"})).await;
    put(&control, "again", &later(9, "04:00")).await;
    put(&control, "gone", &json!({"tier": "pro"})).await;
    control.delete_quota("gone", Precondition::Any, &operator()).await.expect("an end");
    let lines = [
        line("put", later(9, "01:00")),
        line("again", later(9, "01:00")),
        line("gone", later(9, "01:00")),
        line("both", json!({"tier": "pro"})),
        line("both", later(8, "05:00")),
        line("both", later(9, "01:00")),
        line("plain", json!({"tier": "pro"})),
    ];
    let keys = ["put", "again", "gone", "both", "plain"];
    assert_eq!(import(&control, &lines).await.imported, 7);
    let limits = async |limits: [u64; 5], when: &str| {
        for (key, expected) in keys.into_iter().zip(limits) {
            assert_eq!(limit(&limiter, key).await, expected, "{key} {when}");
        }
    };
    limits([5, 5, 3, 5, 5], "before").await;
    // Importing an export restores everything, even if it was deleted meanwhile.
    let lines: Vec<Value> =
        export(&control).await.iter().map(|quota| as_line(quota, &control.installation_id())).collect();
    for key in keys {
        control.delete_quota(key, Precondition::Any, &operator()).await.expect("an end");
    }
    limits([3; 5], "deleted").await;
    let report = import(&control, &lines).await;
    assert_eq!((report.imported, report.failed), (5, 0), "{:?}", report.errors);
    limits([5, 5, 3, 5, 5], "again").await;
    let mut wrong = line("wrong", later(9, "01:00"));
    wrong["until_effective"] = json!({"tier": ""});
    let report = import(&control, &[wrong]).await;
    assert_eq!(report.errors[0].place.as_deref(), Some("until_effective.tier"));
    at(&clock, 1, 0);
    limits([9, 9, 9, 9, 5], "exactly on time").await;
}
