//! Quotas of callers that other attributes than `api_key` identify: users, tenants, networks.

use crate::bulk::as_line;
use crate::{draft, open, operator};
use serde_json::{Value, json};
use std::sync::Arc;
use tollgate_control::{CallerRef, ControlPlane, Cursor, Import, ImportLine, Precondition, QuotaFilter};
use tollgate_core::{Clock, ManualClock, TimeDelta};
use tollgate_engine::{Check, Limiter, UsageOf};
use tollgate_rules::{Options, Ruleset, Source};
use tollgate_store::{MemoryConfig, MemoryStore};

const RULES: &str = "
domain: d
descriptors:
  - key: tenant
    limit: 30/minute
    tiers: {pro: 60/minute}
  - key: user_id
    limit: 3/minute
    tiers: {pro: 5/minute}
    descriptors:
      - {key: endpoint, value: POST /orders, name: orders, limit: 2/minute}
  - {key: api_key, limit: 8/minute, tiers: {pro: 9/minute}}
  - {key: remote_address, limit: 4/minute, tiers: {pro: 6/minute}}
  - {key: path, value: /login, limit: 100/minute}
";

fn rules() -> Arc<Ruleset> {
    let rules = Ruleset::load(&[Source::new("t.yaml", RULES)], &Options::default());
    Arc::new(rules.unwrap_or_else(|errors| panic!("{errors}")))
}

type Memory = MemoryStore<Arc<ManualClock>>;

fn limiter(control: &ControlPlane, clock: &Arc<ManualClock>) -> Limiter<Memory> {
    let store = MemoryStore::new(&MemoryConfig::with_bytes(1 << 20), Arc::clone(clock)).expect("a store");
    let time: Arc<dyn Clock> = Arc::clone(clock) as _;
    Limiter::new(rules(), store, time)
        .with_quotas(control.quota_table())
        .with_measures(control.active_measures())
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

fn of<'a>(key: &'a str, value: &'a str) -> CallerRef<'a> {
    CallerRef::of(key, value)
}

async fn put(control: &ControlPlane, caller: CallerRef<'_>, sent: Value) -> Result<String, String> {
    let put = control.put_quota(caller, draft(&sent), &rules(), Precondition::Any, &operator()).await;
    put.expect("a database").map(|quota| quota.id).map_err(|problem| problem.place)
}

fn override_of(descriptor: &str, count: u64) -> Value {
    json!({"overrides": [{"descriptor": descriptor, "requests_per_unit": count, "unit": "minute"}]})
}

pub(crate) async fn users_and_tenants_have_tiers_and_overrides(address: String) {
    let (control, clock) = open(&address).await;
    let limiter = limiter(&control, &clock);
    let user = of("user_id", "u-1");
    put(&control, user, json!({"tier": "pro"})).await.expect("a quota");
    put(&control, of("user_id", "u-2"), override_of("default", 7)).await.expect("a quota");
    put(&control, of("user_id", "u-3"), override_of("endpoint:POST /orders", 1)).await.expect("a quota");
    assert_eq!(passes(&limiter, &[("user_id", "nobody")]).await, 3, "the rule's");
    assert_eq!(passes(&limiter, &[("user_id", "u-1")]).await, 5, "the tier's");
    assert_eq!(passes(&limiter, &[("user_id", "u-2")]).await, 7, "its own");
    assert_eq!(passes(&limiter, &[("user_id", "u-3"), ("endpoint", "POST /orders")]).await, 1);
    assert_eq!(passes(&limiter, &[("api_key", "u-1")]).await, 8, "the same text is another caller");
    assert_eq!(passes(&limiter, &[("remote_address", "u-1")]).await, 4);

    // What is stored: the attribute, a hash, a few leading characters.
    let found = control.quota(user).await.expect("an answer").expect("a quota");
    assert_eq!(
        (found.key.as_str(), found.key_prefix.as_str(), found.tier.as_deref()),
        ("user_id", "u", Some("pro"))
    );
    assert!(control.quota("u-1").await.expect("an answer").is_none(), "not the API key's");
    let by_id = control.quota(found.id.parse::<tollgate_control::KeyHash>().expect("an id")).await;
    assert_eq!(by_id.expect("an answer").expect("a quota"), found);
    let put = control.audit(None, 10).await.expect("an answer").pop().expect("an entry");
    assert!(put.after.contains("\"key\":\"user_id\"") && !put.after.contains("u-1"), "{}", put.after);

    // By its id, the quota keeps its attribute.
    let id: tollgate_control::KeyHash = found.id.parse().expect("an id");
    let sent = draft(&override_of("default", 9));
    let changed = control.put_quota(id, sent, &rules(), Precondition::Any, &operator()).await;
    assert_eq!(changed.expect("a database").expect("a quota").key, "user_id");
    clock.advance(TimeDelta::from_secs(120));
    assert_eq!(passes(&limiter, &[("user_id", "u-1")]).await, 9);
    control.delete_quota(user, Precondition::Any, &operator()).await.expect("a deletion");
    clock.advance(TimeDelta::from_secs(120));
    assert_eq!(passes(&limiter, &[("user_id", "u-1")]).await, 3);
}

pub(crate) async fn the_rules_decide_which_quota_counts(address: String) {
    let (control, clock) = open(&address).await;
    let limiter = limiter(&control, &clock);
    let request = [("tenant", "acme"), ("user_id", "u-1"), ("api_key", "k")];
    assert_eq!(passes(&limiter, &request).await, 3, "the user's limit is the tightest");
    clock.advance(TimeDelta::from_secs(120));
    put(&control, of("user_id", "u-1"), override_of("default", 20)).await.expect("a quota");
    assert_eq!(
        passes(&limiter, &request).await,
        8,
        "now the API key's, which the user's quota does not lift"
    );
    clock.advance(TimeDelta::from_secs(120));
    put(&control, of("api_key", "k"), json!({"tier": "pro"})).await.expect("a quota");
    assert_eq!(passes(&limiter, &request).await, 9, "the API key's tier");
    for (key, value, sent, field) in [
        ("email", "a@b.c", json!({"tier": "pro"}), "key"),
        ("path", "/login", json!({"tier": "pro"}), "key"),
        ("", "u-1", json!({"tier": "pro"}), "key"),
        ("user_id", "", json!({"tier": "pro"}), "value"),
        ("user_id", "a\nb", json!({"tier": "pro"}), "value"),
        ("user_id", "u-1", override_of("tenant", 1), "overrides[0].descriptor"),
        ("remote_address", "10.0.0.1/8", json!({"tier": "pro"}), "value"),
        ("remote_address", "10.0.0.0/33", json!({"tier": "pro"}), "value"),
    ] {
        assert_eq!(put(&control, of(key, value), sent).await, Err(field.to_owned()), "{key}={value}");
    }
}

pub(crate) async fn networks_have_quotas_and_the_longest_prefix_wins(database: String) {
    let (control, clock) = open(&database).await;
    let limiter = limiter(&control, &clock);
    fn address(value: &str) -> CallerRef<'_> {
        of("remote_address", value)
    }
    put(&control, address("10.0.0.0/8"), json!({"tier": "pro"})).await.expect("a quota");
    put(&control, address("10.1.0.0/16"), override_of("default", 9)).await.expect("a quota");
    put(&control, address("::ffff:10.1.2.3"), override_of("default", 1)).await.expect("a quota");
    put(&control, address("2001:db8::/32"), override_of("default", 2)).await.expect("a quota");
    let shown = control.quota(address("10.1.2.3")).await.expect("an answer").expect("the same address");
    assert_eq!(shown.key_prefix, "10.1.2.3", "networks are shown whole, in their canonical form");
    for (client, count) in [
        ("192.0.2.1", 4),
        ("10.200.0.1", 6),
        ("10.1.0.1", 9),
        ("10.1.2.3", 1),
        ("2001:db8:7::1", 2),
        ("2001:db9::1", 4),
        ("unix", 4),
    ] {
        assert_eq!(passes(&limiter, &[("remote_address", client)]).await, count, "{client}");
    }
    control.delete_quota(address("10.1.0.0/16"), Precondition::Any, &operator()).await.expect("a deletion");
    clock.advance(TimeDelta::from_secs(120));
    assert_eq!(passes(&limiter, &[("remote_address", "10.1.0.1")]).await, 6, "the wider network's");
    // A lookup costs as much as there are lengths, so these are bounded.
    for bits in 9..=21 {
        let network = format!("10.0.0.0/{bits}");
        put(&control, address(&network), json!({"tier": "pro"})).await.expect("a quota");
    }
    assert_eq!(put(&control, address("10.0.0.0/30"), json!({"tier": "pro"})).await, Err("value".to_owned()));
    put(&control, address("11.0.0.0/21"), json!({"tier": "pro"})).await.expect("a length in use");
}

pub(crate) async fn grants_and_resets_are_for_any_caller(address: String) {
    let (control, clock) = open(&address).await;
    let (other, _) = open(&address).await;
    let limiter = limiter(&other, &clock);
    let user = of("user_id", "u-1");
    let sent = |sent: Value| serde_json::from_value(sent).expect("a draft");
    let granted =
        control.grant(user, sent(json!({"units": 4, "reason": "sorry"})), &rules(), &operator()).await;
    let granted = granted.expect("a database").expect("a grant");
    assert_eq!((granted.key.as_str(), granted.rule.as_str()), ("user_id", "default"));
    other.catch_up().await.expect("an answer");
    let request = [("user_id", "u-1"), ("tenant", "acme")];
    assert_eq!(passes(&limiter, &request).await, 7, "three and four, on another node");
    assert_eq!(passes(&limiter, &[("api_key", "u-1")]).await, 8);
    let usage_of =
        UsageOf { domain: None, key: "user_id", attributes: &request[..1], address: None, rule: None };
    let usage = limiter.usage(&usage_of).await.expect("usage");
    assert_eq!((usage.grants[0].units, usage.grants[0].remaining), (4, Some(0)));
    let used: Vec<_> =
        usage.limits.iter().map(|one| (one.rule.as_str(), one.used(), one.is_shared)).collect();
    assert_eq!(
        used,
        [("user_id", Some(3), false), ("orders", Some(0), false), ("path=/login", Some(0), true)]
    );
    control
        .audit_reset(user, None, "ticket 9", "{}".to_owned(), &operator())
        .await
        .expect("a database")
        .expect("recorded");
    limiter.reset(&usage_of).await.expect("a reset");
    assert_eq!(passes(&limiter, &request).await, 3, "its own limit again, and the tenant's stays used");
    control.revoke_grant(user, &granted.id, &operator()).await.expect("revoked");
    let missing = control.revoke_grant("u-1", &granted.id, &operator()).await;
    assert!(missing.is_err(), "not the API key's");
    let wrong = control
        .grant(of("email", "x"), sent(json!({"units": 1, "reason": "r"})), &rules(), &operator())
        .await;
    assert_eq!(wrong.expect("a database").expect_err("no such key").place, "key");
}

pub(crate) async fn lists_and_files_name_the_attribute(address: String) {
    let (control, clock) = open(&address).await;
    let mut import = Import::begin(&control, rules(), operator()).expect("no other import");
    let lines = [
        json!({"api_key": "a-key", "tier": "pro"}),
        json!({"key": "user_id", "value": "u-1", "tier": "pro"}),
        json!({"key": "tenant", "value": "acme", "tier": "pro"}),
        json!({"key": "remote_address", "value": "10.0.0.0/8", "tier": "pro"}),
        json!({"key": "api_key", "value": "another-key", "tier": "pro"}),
        json!({"key": "user_id", "api_key": "u-1", "tier": "pro"}),
        json!({"key": "email", "value": "u-1", "tier": "pro"}),
        json!({"key": "user_id", "tier": "pro"}),
    ];
    for (line, sent) in (1..).zip(&lines) {
        let read: ImportLine = serde_json::from_value(sent.clone()).expect("a line");
        import.line(line, b"", read).await.expect("a database");
    }
    let report = import.finish().await.expect("a database");
    drop(import);
    let errors: Vec<_> = report.errors.iter().map(|one| (one.line, one.place.as_deref())).collect();
    assert_eq!(errors, [(6, Some("api_key")), (7, Some("key")), (8, Some("value"))]);
    let listed = async |key: Option<&str>, tier: Option<&str>| {
        let filter = QuotaFilter {
            key: key.map(str::to_owned),
            tier: tier.map(str::to_owned),
            ..QuotaFilter::default()
        };
        let page = control.quotas(&filter).await.expect("a page");
        let mut all: Vec<String> =
            page.quotas.into_iter().map(|one| format!("{} {}", one.key, one.key_prefix)).collect();
        all.sort();
        all
    };
    let all = ["api_key a", "api_key an", "remote_address 10.0.0.0/8", "tenant a", "user_id u"];
    assert_eq!(listed(None, None).await, all);
    assert_eq!(listed(Some("api_key"), None).await, &all[..2]);
    assert_eq!(listed(Some("user_id"), None).await, &all[4..]);
    assert_eq!(listed(Some("remote_address"), Some("pro")).await, &all[2..3]);
    assert_eq!(listed(Some("user_id"), Some("free")).await, [""; 0]);
    let filter = QuotaFilter { prefix: Some("10.0.0.0".to_owned()), ..QuotaFilter::default() };
    let page = control.quotas(&filter).await.expect("a page");
    assert_eq!(page.quotas.len(), 1);
    let cursor = format!("{}.{}", page.quotas[0].revision, "2001:db8:ffff:ffff:ffff:ffff:ffff:0/120");
    assert!(Cursor::parse(&cursor).is_some());

    // An export restores every attribute.
    let installation = control.installation_id();
    let exported = control.export(None).await.expect("an answer");
    for quota in &exported {
        let id: tollgate_control::KeyHash = quota.id.parse().expect("an id");
        control.delete_quota(id, Precondition::Any, &operator()).await.expect("a deletion");
    }
    let limiter = limiter(&control, &clock);
    assert_eq!(passes(&limiter, &[("user_id", "u-1")]).await, 3);
    let mut import = Import::begin(&control, rules(), operator()).expect("no other import");
    for (line, quota) in (1..).zip(&exported) {
        let read = serde_json::from_value(as_line(quota, &installation)).expect("a line");
        import.line(line, b"", read).await.expect("a database");
    }
    let report = import.finish().await.expect("a database");
    assert_eq!((report.imported, report.failed), (5, 0), "{report:?}");
    assert_eq!(listed(None, None).await, all);
    clock.advance(TimeDelta::from_secs(120));
    assert_eq!(passes(&limiter, &[("user_id", "u-1")]).await, 5);
    assert_eq!(passes(&limiter, &[("remote_address", "10.9.9.9")]).await, 6);
}

/// Networks of at most sixteen lengths have quotas, also if one import brings them all.
pub(crate) async fn an_import_keeps_the_bound_on_network_lengths(address: String) {
    let (control, _) = open(&address).await;
    let import = async |lengths: std::ops::Range<u8>| {
        let mut import = Import::begin(&control, rules(), operator()).expect("no other import");
        for (line, bits) in (1..).zip(lengths) {
            let sent = json!({"key": "remote_address", "value": format!("10.0.0.0/{bits}"), "tier": "pro"});
            import.line(line, b"", serde_json::from_value(sent).expect("a line")).await.expect("a database");
        }
        import.finish().await.expect("a database")
    };
    let report = import(8..28).await;
    assert_eq!((report.imported, report.failed), (16, 4), "{report:?}");
    assert!(report.errors[0].detail.contains("16 lengths"), "{report:?}");
    let again = import(8..24).await;
    assert_eq!((again.imported, again.failed), (16, 0), "lengths in use stay usable: {again:?}");
}

/// A node that starts while the database is unavailable applies the quotas of all attributes.
pub(crate) async fn a_snapshot_keeps_the_attribute(address: String) {
    let (control, clock) = open(&address).await;
    for (key, value) in [("user_id", "u-1"), ("api_key", "k"), ("remote_address", "10.0.0.0/8")] {
        put(&control, of(key, value), json!({"tier": "pro"})).await.expect("a quota");
    }
    let sent = serde_json::from_value(json!({"units": 2, "reason": "sorry"})).expect("a draft");
    control
        .grant(of("tenant", "acme"), sent, &rules(), &operator())
        .await
        .expect("a database")
        .expect("a grant");
    let folder = crate::databases::Place::new();
    let file = folder.path().join("known");
    let snapshots = tokio::spawn(Arc::clone(&control).run_snapshots(file.clone()));
    let quotas = folder.path().join("known.quotas");
    crate::until("both files", || file.is_file() && quotas.is_file()).await;
    snapshots.abort();
    let _ = snapshots.await;
    // Nothing listens there.
    let nowhere = "postgres://127.0.0.1:9/none?sslmode=disable";
    let restored = ControlPlane::connect_or_restore(nowhere, Arc::clone(&clock) as _, Some(&file)).await;
    let (restored, from_file) = restored.expect("the snapshot");
    assert!(from_file && restored.is_loaded());
    let limiter = limiter(&restored, &clock);
    for (key, value, count) in
        [("user_id", "u-1", 5), ("user_id", "u-2", 3), ("api_key", "k", 9), ("remote_address", "10.0.0.7", 6)]
    {
        assert_eq!(passes(&limiter, &[(key, value)]).await, count, "{key}={value}");
    }
    let tenant =
        UsageOf { domain: None, key: "tenant", attributes: &[("tenant", "acme")], address: None, rule: None };
    assert_eq!(limiter.usage(&tenant).await.expect("usage").grants[0].units, 2);
}
