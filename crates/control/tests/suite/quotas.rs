//! Quotas are stored as sent, and invalid ones are rejected.

use crate::{draft, open, operator, rules};
use serde_json::json;
use tollgate_control::{ControlError, Cursor, Precondition, QuotaFilter};
use tollgate_core::TimeDelta;

pub(crate) async fn a_quota_is_stored_until_it_is_deleted(address: String) {
    let (control, _) = open(&address).await;
    let sent = json!({
        "tier": "pro",
        "overrides": [{"descriptor": "orders", "requests_per_unit": 500, "unit": "minute", "burst": 50}],
        "effective_at": "2026-02-01T00:00:00Z",
        "expires_at": "2026-03-01T01:00:00+01:00",
        "reason": "ticket 12",
        "author": "sales",
    });
    assert!(control.quota("abc123-secret").await.expect("an answer").is_none());
    let put =
        control.put_quota("abc123-secret", draft(&sent), &rules(), Precondition::Any, &operator()).await;
    let put = put.expect("a database").expect("a quota");
    let got = control.quota("abc123-secret").await.expect("an answer").expect("a quota");
    assert_eq!(put, got);
    assert_eq!((got.key_prefix.as_str(), got.tier.as_deref()), ("abc", Some("pro")));
    assert_eq!(
        (got.effective_at.as_deref(), got.expires_at.as_deref()),
        (Some("2026-02-01T00:00:00Z"), Some("2026-03-01T00:00:00Z"))
    );
    assert_eq!((got.reason.as_str(), got.author.as_str()), ("ticket 12", "sales"));
    assert_eq!(serde_json::to_value(&got.overrides).expect("JSON"), sent["overrides"]);
    control.delete_quota("abc123-secret", Precondition::Any, &operator()).await.expect("a deletion");
    assert!(control.quota("abc123-secret").await.expect("an answer").is_none());
    let again = control.delete_quota("abc123-secret", Precondition::Any, &operator()).await;
    assert!(matches!(again, Err(ControlError::NotFound(_))), "{again:?}");
}

pub(crate) async fn a_concurrent_change_is_not_overwritten(address: String) {
    let (control, _) = open(&address).await;
    let put = async |expected| {
        let sent = draft(&json!({"tier": "pro"}));
        control
            .put_quota("key", sent, &rules(), expected, &operator())
            .await
            .map(|put| put.expect("a quota").revision)
    };
    assert!(matches!(put(Precondition::Present).await, Err(ControlError::Conflict)));
    let first = put(Precondition::Absent).await.expect("nothing was there");
    assert!(matches!(put(Precondition::Absent).await, Err(ControlError::Conflict)));
    let second = put(Precondition::Revision(first)).await.expect("the first was there");
    assert!(matches!(put(Precondition::Revision(first)).await, Err(ControlError::Conflict)));
    let stale = control.delete_quota("key", Precondition::Revision(first), &operator()).await;
    assert!(matches!(stale, Err(ControlError::Conflict)));
    assert_eq!(control.quota("key").await.expect("an answer").expect("a quota").revision, second);
    control.delete_quota("key", Precondition::Revision(second), &operator()).await.expect("a deletion");
    put(Precondition::Absent).await.expect("a deleted quota is absent");
}

pub(crate) async fn lists_are_paged(address: String) {
    let (control, _) = open(&address).await;
    for i in 0..205 {
        let tier = if i % 4 == 0 { "free" } else { "pro" };
        let sent = draft(&json!({"tier": tier}));
        let put =
            control.put_quota(&format!("key-{i}"), sent, &rules(), Precondition::Any, &operator()).await;
        put.expect("a database").expect("a quota");
    }
    for (tier, count, pages) in
        [(None, 205, 3), (Some("free"), 52, 1), (Some("pro"), 153, 2), (Some("none"), 0, 1)]
    {
        let (mut ids, mut seen) = (Vec::new(), 0);
        let mut filter = QuotaFilter { tier: tier.map(str::to_owned), ..QuotaFilter::default() };
        loop {
            let page = control.quotas(&filter).await.expect("a page");
            assert!(page.quotas.iter().all(|quota| tier.is_none() || quota.tier.as_deref() == tier));
            ids.extend(page.quotas.into_iter().map(|quota| quota.id));
            seen += 1;
            let Some(next) = page.next_cursor else { break };
            filter.after = Some(Cursor::parse(&next).expect("a cursor"));
        }
        ids.sort();
        ids.dedup();
        assert_eq!((ids.len(), seen), (count, pages), "{tier:?}");
    }
}

pub(crate) async fn an_invalid_quota_is_rejected_with_its_field(address: String) {
    let (control, _) = open(&address).await;
    let own = |descriptor: &str, unit: &str| json!({"overrides": [{"descriptor": descriptor, "requests_per_unit": 5, "unit": unit}]});
    let long = "x".repeat(600);
    let many: Vec<_> = (1..=33)
        .map(|i| json!({"descriptor": "orders", "requests_per_unit": 1, "unit": format!("{i}s")}))
        .collect();
    for (sent, field) in [
        (json!({}), "tier"),
        (json!({"tier": ""}), "tier"),
        (json!({"tier": "pro\n"}), "tier"),
        (own("nothing", "minute"), "overrides[0].descriptor"),
        // All callers share its counters: an override for one would affect all.
        (own("path", "minute"), "overrides[0].descriptor"),
        (own(&long, "minute"), "overrides[0].descriptor"),
        (own("orders", "fortnight"), "overrides[0].unit"),
        (own("orders", "20 years"), "overrides[0].requests_per_unit"),
        (json!({"overrides": many}), "overrides"),
        (
            json!({"overrides": [
                {"descriptor": "orders", "requests_per_unit": 1, "unit": "s"},
                {"descriptor": "api_key/endpoint=POST /orders", "requests_per_unit": 2, "unit": "second"},
            ]}),
            "overrides[1].unit",
        ),
        (json!({"tier": "pro", "effective_at": "tomorrow"}), "effective_at"),
        (json!({"tier": "pro", "expires_at": "2025-01-01T00:00:00Z"}), "expires_at"),
        (
            json!({"tier": "pro", "effective_at": "2026-06-01T00:00:00Z", "expires_at": "2026-05-01T00:00:00Z"}),
            "expires_at",
        ),
        (json!({"tier": "pro", "expires_at": "9999-01-01T00:00:00Z"}), "expires_at"),
        (json!({"tier": "pro", "reason": long}), "reason"),
    ] {
        let put = control.put_quota("key", draft(&sent), &rules(), Precondition::Any, &operator()).await;
        let problem = put.expect("a database").expect_err(&sent.to_string());
        assert_eq!(problem.place, field, "{sent}: {}", problem.detail);
    }
    assert!(control.quota("key").await.expect("an answer").is_none());
    assert_eq!(control.audit(None, 10).await.expect("an answer"), []);
}

pub(crate) async fn no_key_is_stored(address: String) {
    let (control, _) = open(&address).await;
    let key = "sk_live_51H8xQ2eZvKYlo2C";
    let sent = draft(&json!({"tier": "pro"}));
    let put = control.put_quota(key, sent, &rules(), Precondition::Any, &operator()).await;
    let put = put.expect("a database").expect("a quota");
    let output = format!("{put:?} {:?}", control.audit(None, 10).await.expect("an answer"));
    assert!(output.contains("sk_liv") && !output.contains(&key[..8]), "{output}");
    if let Some(path) = address.strip_prefix("sqlite:") {
        for file in [path.to_owned(), format!("{path}-wal")] {
            let bytes = std::fs::read(&file).expect("a file");
            let found = bytes.windows(8).any(|window| window == &key.as_bytes()[..8]);
            assert!(!found, "{file} contains the key");
        }
        use std::os::unix::fs::PermissionsExt;
        let mode = std::fs::metadata(path).expect("a file").permissions().mode();
        assert_eq!(mode & 0o077, 0, "only its owner may read {path}");
    }
}

pub(crate) async fn deleted_quotas_are_purged_after_a_week(address: String) {
    let (one, clock) = open(&address).await;
    let (late, late_clock) = open(&address).await;
    for key in ["gone", "stays"] {
        let sent = draft(&json!({"tier": "pro"}));
        let put = one.put_quota(key, sent, &rules(), Precondition::Any, &operator()).await;
        put.expect("a database").expect("a quota");
    }
    late.catch_up().await.expect("an answer");
    one.delete_quota("gone", Precondition::Any, &operator()).await.expect("a deletion");
    assert_eq!(one.purge().await.expect("an answer"), 0, "other nodes may not have read it yet");
    let week = TimeDelta::from_secs(7 * 86_400 + 1);
    clock.advance(week);
    assert_eq!(one.purge().await.expect("an answer"), 1);
    assert_eq!(one.purge().await.expect("an answer"), 0);
    // A node that was disconnected all that time can no longer read the deletion, and still removes the quota.
    assert_eq!(late.quota_table().len(), 2);
    late_clock.advance(week);
    late.catch_up().await.expect("an answer");
    assert_eq!(late.quota_table().len(), 1);
}
