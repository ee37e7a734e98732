//! Snapshot files for a start while PostgreSQL is unavailable; and migrations beside older nodes that write.

use crate::databases::Postgres;
use crate::{START, draft, open, operator, rules, until};
use serde_json::json;
use std::sync::Arc;
use std::time::Duration;
use tollgate_control::{ControlPlane, Precondition};
use tollgate_core::{ManualClock, TimeDelta, Timestamp};
use tollgate_engine::{Check, QuotaProvider};

/// Reverts the schema to what it was before version 5.
const BEFORE: &str = "
    DROP INDEX quotas_by_tier_and_change;
    DROP INDEX quotas_by_prefix_and_change;
    CREATE INDEX quotas_by_tier ON quotas (tier, key_hash);
    CREATE INDEX quotas_by_prefix ON quotas (key_prefix, key_hash);
    DROP INDEX rule_revisions_by_revision;
    DROP TABLE history;
    DROP TABLE history_names;
    DROP TABLE nodes;
    DROP TABLE consumption;
    DROP TABLE consumption_months;
    DROP TABLE consumption_head;
    DROP TABLE durable_consumption;
    DROP TABLE shared_records;
    DROP TABLE traffic_asked;
    DROP TABLE traffic_told;
    ALTER TABLE tokens DROP COLUMN digest;
    DROP INDEX quotas_by_attribute;
    ALTER TABLE quotas DROP COLUMN attribute;
    ALTER TABLE grants DROP COLUMN attribute;
    ALTER TABLE quotas DROP COLUMN until_tier, DROP COLUMN until_overrides, DROP COLUMN until_expires_at;
    DELETE FROM tollgate_schema WHERE version >= 5";

const WRITE: &str =
    "INSERT INTO quotas (key_hash, key_prefix, overrides, reason, author, updated_at, deleted, revision)
     VALUES (decode(repeat('00', 32), 'hex'), 'a', '[]', '', '', 0, 0, 1000)";

/// Counts the transactions that wait for a lock.
const WAITS: &str = "SELECT COUNT(*) FROM pg_locks WHERE NOT granted";

async fn advance(clock: &ManualClock) {
    clock.advance(TimeDelta::from_secs(1));
    tokio::time::sleep(Duration::from_millis(10)).await;
}

#[tokio::test(flavor = "multi_thread")]
#[cfg_attr(not(feature = "external-tests"), ignore = "needs PostgreSQL: make test")]
async fn a_snapshot_does_not_restore_what_was_revoked_since() {
    let mut server = Postgres::start();
    let address = server.database("snapshot");
    let folder = crate::databases::Place::new();
    let file = folder.path().join("known");
    let (one, clock) = open(&address).await;
    let sent = serde_json::from_value(json!({"units": 4, "reason": "a mistake"})).expect("a draft");
    let granted = one.grant("key", sent, &rules(), &operator()).await.expect("a database").expect("a grant");
    // A pending quota keeps the current terms until then.
    for sent in [json!({"tier": "pro"}), json!({"tier": "free", "effective_at": "2026-06-01T00:00:00Z"})] {
        let put = one.put_quota("other", draft(&sent), &rules(), Precondition::Any, &operator()).await;
        put.expect("a database").expect("a quota");
    }

    // A file that cannot be written at first is written as soon as it can be.
    std::fs::create_dir_all(file.join("obstacle")).expect("a folder");
    let snapshots = tokio::spawn(Arc::clone(&one).run_snapshots(file.clone()));
    let quotas = folder.path().join("known.quotas");
    until("the quotas, which come after it", || quotas.is_file()).await;
    std::fs::remove_dir_all(&file).expect("no obstacle");
    for _ in 0..3_000 {
        if file.is_file() {
            break;
        }
        advance(&clock).await;
    }
    assert!(file.is_file(), "the write was retried");
    // Nothing changes for days; the file is still refreshed.
    let before = std::fs::metadata(&quotas).and_then(|metadata| metadata.modified()).expect("a file");
    clock.advance(TimeDelta::from_secs(6 * 86_400));
    one.catch_up().await.expect("an answer");
    until("the quotas again", || {
        std::fs::metadata(&quotas).and_then(|metadata| metadata.modified()).is_ok_and(|at| at != before)
    })
    .await;
    snapshots.abort();
    let _ = snapshots.await;
    one.revoke_grant("key", &granted.id, &operator()).await.expect("revoked");
    one.close().await;

    server.stop("INT");
    let restarted = ControlPlane::connect_or_restore(&address, Arc::clone(&clock) as _, Some(&file)).await;
    let (two, restored) = restarted.expect("the snapshot");
    assert!(restored && two.is_loaded());
    assert!(two.staleness_millis() < 60_000, "{}", two.staleness_millis());
    let has = |key: &str| {
        let attributes = [("api_key", key)];
        let agreed = two.quota_table().lookup(&Check::attributes("d", &attributes), &rules(), &*clock);
        (!agreed.quotas.is_empty(), agreed.grants.is_some())
    };
    assert_eq!((has("key"), has("other")), ((false, true), (true, false)), "as last known");
    server.start_again();
    for _ in 0..3_000 {
        if two.catch_up().await.is_ok() {
            break;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert!(!two.is_restored());
    assert_eq!((has("key"), has("other")), ((false, false), (true, false)));
}

/// A node that writes while a newer one migrates the schema: both succeed.
#[tokio::test(flavor = "multi_thread")]
#[cfg_attr(not(feature = "external-tests"), ignore = "needs PostgreSQL: make test")]
async fn migrations_run_beside_writers() {
    let server = Postgres::start();
    let address = server.database("upgraded");
    open(&address).await.0.close().await;
    let pool = sqlx::PgPool::connect(&address).await.expect("a database");
    sqlx::raw_sql(BEFORE).execute(&pool).await.expect("older tables");

    let mut writer = pool.begin().await.expect("a transaction");
    let head = sqlx::query("UPDATE head SET revision = revision + 1000 WHERE id = 1");
    head.execute(&mut *writer).await.expect("the head");
    let clock = Arc::new(ManualClock::at(Timestamp::from_secs(START)));
    let newer = tokio::spawn({
        let address = address.clone();
        async move { ControlPlane::connect(&address, clock).await }
    });
    for attempt in 0.. {
        let (waits,): (i64,) = sqlx::query_as(WAITS).fetch_one(&pool).await.expect("an answer");
        if waits > 0 {
            break;
        }
        assert!(attempt < 3_000, "timed out waiting for the migration to wait for the writer");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    sqlx::query(WRITE).execute(&mut *writer).await.expect("a quota");
    writer.commit().await.expect("written");
    let newer = newer.await.expect("a start").expect("new tables");
    newer.catch_up().await.expect("an answer");
    assert_eq!(newer.revision(), 1000);
}
