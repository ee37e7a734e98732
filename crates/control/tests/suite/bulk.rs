//! Bulk import and export, and import of an export.

use crate::{draft, open, operator, rules};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::sync::Arc;
use tollgate_control::{
    AuditVerification, ControlPlane, Cursor, Import, ImportLine, ImportReport, Precondition, Quota,
    QuotaFilter,
};

pub(crate) async fn import(node: &Arc<ControlPlane>, lines: &[Value]) -> ImportReport {
    let mut import = Import::begin(node, rules(), operator()).expect("no other import");
    assert!(Import::begin(node, rules(), operator()).is_none(), "one at a time");
    for (line, sent) in (1..).zip(lines) {
        let text = sent.to_string();
        let read: ImportLine = serde_json::from_str(&text).expect("a line");
        import.line(line, text.as_bytes(), read).await.expect("a database");
    }
    import.finish().await.expect("a database")
}

pub(crate) async fn export(node: &ControlPlane) -> Vec<Quota> {
    let mut all: Vec<Quota> = Vec::new();
    loop {
        let after = all.last().map(|last| last.id.parse().expect("an id"));
        let page = node.export(after).await.expect("an answer");
        if page.is_empty() {
            return all;
        }
        all.extend(page);
    }
}

pub(crate) fn as_line(quota: &Quota, installation: &str) -> Value {
    let mut line = json!(quota);
    line["installation"] = installation.into();
    line
}

pub(crate) async fn an_import_takes_effect_and_its_export_can_be_imported(address: String) {
    let (one, _) = open(&address).await;
    let (two, _) = open(&address).await;
    let lines: Vec<Value> = (0..9_001)
        .map(|i| match i {
            17 => json!({"api_key": "x", "tier": ""}),
            4_500 => json!({"tier": "pro"}),
            _ => json!({"api_key": format!("key-{i}"), "tier": "pro", "reason": format!("line {i}")}),
        })
        .collect();
    let report = import(&one, &lines).await;
    assert_eq!((report.imported, report.failed), (8_999, 2));
    let wrong: Vec<_> = report.errors.iter().map(|error| (error.line, error.place.as_deref())).collect();
    assert_eq!(wrong, [(18, Some("tier")), (4_501, Some("api_key"))]);
    assert_eq!(one.quota_table().len(), 8_999, "active on the node that received it");
    two.catch_up().await.expect("an answer");
    assert_eq!((two.quota_table().len(), two.revision()), (8_999, one.revision()));

    // Every row has its own revision, so that pages of replication can end anywhere.
    let before = export(&one).await;
    let revisions: BTreeSet<i64> = before.iter().map(|quota| quota.revision).collect();
    assert_eq!((before.len(), revisions.len()), (8_999, 8_999));
    assert_eq!(revisions.last(), Some(&one.revision()));
    assert_eq!(one.quota("key-3").await.expect("an answer").expect("a quota").reason, "line 3");
    // One audit entry per batch, whatever the batch size, and each line in one of them.
    let audit = one.audit(None, 10).await.expect("an answer");
    let batches: Vec<Value> = audit.iter().rev().map(|entry| entry.after.parse().expect("JSON")).collect();
    assert!(audit.iter().all(|entry| entry.action == "quota.import") && (2..=3).contains(&batches.len()));
    let sum = |field: &str| batches.iter().filter_map(|batch| batch[field].as_u64()).sum::<u64>();
    assert_eq!((sum("lines"), sum("keys")), (8_999, 8_999));
    let ends = (&batches[0]["first_line"], &batches[batches.len() - 1]["last_line"]);
    assert_eq!(ends, (&json!(1), &json!(9_001)));
    assert!(batches.windows(2).all(|two| two[0]["last_line"].as_u64() < two[1]["first_line"].as_u64()));
    assert!(batches.iter().all(|batch| batch["sha256"].as_str().is_some_and(|sum| sum.len() == 64)));

    let lines: Vec<Value> = before.iter().map(|quota| as_line(quota, &one.installation_id())).collect();
    let report = import(&two, &lines).await;
    assert_eq!((report.imported, report.failed), (8_999, 0), "{:?}", report.errors.first());
    let same = |quota: &Quota| {
        let Quota { id, key_prefix, tier, overrides, reason, author, .. } = quota.clone();
        (id, key_prefix, tier, overrides, reason, author)
    };
    let after = export(&one).await;
    assert!(before.iter().map(same).eq(after.iter().map(same)), "nothing is lost");
    assert!(matches!(one.verify_audit().await, Ok(AuditVerification::Intact { entries: 4..=6, .. })));
}

async fn put(node: &ControlPlane, key: &str) {
    let sent = draft(&json!({"tier": "free"}));
    let put = node.put_quota(key, sent, &rules(), Precondition::Any, &operator()).await;
    put.expect("a database").expect("a quota");
}

pub(crate) async fn an_import_replaces_existing_quotas(address: String) {
    let (one, _) = open(&address).await;
    let (two, _) = open(&address).await;
    put(&two, "there").await;
    two.delete_quota("there", Precondition::Any, &operator()).await.expect("a deletion");
    // Of several lines for one key the last counts; a line for a deleted key restores it.
    let line = |key: &str, reason: &str| json!({"api_key": key, "tier": "pro", "reason": reason});
    let report = import(&one, &[line("a", "1"), line("there", "2"), line("a", "3")]).await;
    assert_eq!((report.imported, report.failed), (3, 0));
    assert_eq!(one.quota_table().len(), 2);
    let found = one.quota("a").await.expect("an answer").expect("a quota");
    assert_eq!((found.reason.as_str(), found.author.as_str()), ("3", "ada"));

    // Other nodes write meanwhile, and all converge.
    let writing = tokio::spawn(async move {
        for _ in 0..20 {
            put(&two, "other").await;
        }
        two
    });
    let lines: Vec<Value> = (0..5_000).map(|i| line(&format!("k{i}"), "")).collect();
    import(&one, &lines).await;
    let two = writing.await.expect("a writer");
    for node in [&one, &two] {
        node.catch_up().await.expect("an answer");
        assert_eq!(node.quota_table().len(), 5_003);
    }
    assert_eq!(one.revision(), two.revision());
    assert!(matches!(one.verify_audit().await, Ok(AuditVerification::Intact { .. })));

    let foreign = json!({"id": found.id, "installation": "0123456789ab", "tier": "pro"});
    let swapped = json!({"api_key": "b", "id": found.id, "tier": "pro"});
    let nonsense = json!({"id": "zz", "tier": "pro"});
    let report = import(&one, &[foreign, swapped, nonsense]).await;
    let fields: Vec<_> = report.errors.iter().filter_map(|error| error.place.as_deref()).collect();
    assert_eq!((report.imported, fields), (0, vec!["installation", "id", "id"]));
}

pub(crate) async fn keys_are_found_by_prefix(address: String) {
    let (node, _) = open(&address).await;
    let line = |key: String, tier: &str| json!({"api_key": key, "tier": tier});
    let mut lines: Vec<Value> = (0..250).map(|i| line(format!("live_abcdefghij{i:0>10}"), "pro")).collect();
    lines.extend((0..5).map(|i| line(format!("test_%abcdefghi{i:0>10}"), "free")));
    lines.push(line("k".to_owned(), "pro"));
    import(&node, &lines).await;
    let find = async |prefix: &str, tier: Option<&str>| {
        let mut filter = QuotaFilter {
            prefix: Some(prefix.to_owned()),
            tier: tier.map(str::to_owned),
            ..QuotaFilter::default()
        };
        let mut found = BTreeSet::new();
        loop {
            let page = node.quotas(&filter).await.expect("an answer");
            assert!(page.quotas.len() <= 100);
            for quota in page.quotas {
                assert!(found.insert(quota.id), "each once");
            }
            match page.next_cursor {
                None => return found.len(),
                Some(cursor) => filter.after = Some(Cursor::parse(&cursor).expect("a cursor")),
            }
        }
    };
    assert_eq!(find("live_", None).await, 250);
    assert_eq!(find("live_abcdefghij0000000001", None).await, 250, "only six characters of a key are stored");
    assert_eq!(find("test_", Some("free")).await, 5);
    assert_eq!(find("test_", Some("pro")).await, 0);
    assert_eq!(find("test_%", None).await, 5, "the prefix is not a pattern");
    assert_eq!(find("%", None).await, 0);
    assert_eq!(find("k", None).await, 1, "a short key has a prefix too");
    assert_eq!(find("zzz", None).await, 0);
}
