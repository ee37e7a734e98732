//! Tests that an import restores the settings of the SQLite writer, however it ends. The setting belongs to the
//! connection, so it is only visible from inside the crate.

use super::*;
use tollgate_core::{ManualClock, Timestamp};
use tollgate_rules::{Options, Source};

/// Returns the number of log pages per checkpoint.
async fn setting(control: &ControlPlane) -> i64 {
    let Db::Sqlite { write, .. } = &control.db else { panic!("a file") };
    let (pages,): (i64,) =
        sqlx::query_as("PRAGMA wal_autocheckpoint").fetch_one(write).await.expect("an answer");
    pages
}

async fn begin(control: &Arc<ControlPlane>) -> Import {
    let source = Source::new(
        "t.yaml",
        "domain: d\ndescriptors: [{key: api_key, limit: 3/minute, tiers: {pro: 5/minute}}]",
    );
    let rules = Ruleset::load(&[source], &Options::default()).expect("rules");
    let actor = Actor { name: "ada".to_owned(), origin: String::new() };
    let mut import = Import::begin(control, Arc::new(rules), actor).expect("no other");
    for line in 1..=4_000 {
        let read = serde_json::json!({"api_key": format!("k{line}"), "tier": "pro"});
        let read = serde_json::from_value(read).expect("a line");
        import.line(line, b"", read).await.expect("a database");
    }
    assert!(import.writing.is_some(), "a batch is under way");
    import
}

#[tokio::test(flavor = "multi_thread")]
async fn the_writer_settings_are_restored_however_an_import_ends() {
    let file = std::env::temp_dir().join(format!("tollgate-bulk-{}.db", std::process::id()));
    let clock = Arc::new(ManualClock::at(Timestamp::from_secs(1_767_225_600)));
    let control = ControlPlane::open(&format!("sqlite:{}", file.display()), clock).await.expect("a database");
    let usual = setting(&control).await;

    // The client disconnected: the next import starts after the cleanup.
    drop(begin(&control).await);
    let free = control.import_lock.lock().await;
    assert_eq!(setting(&control).await, usual);
    drop(free);
    control.catch_up().await.expect("an answer");
    assert_eq!(control.quota_table.len(), 4_000, "the batch being written was completed");

    // The database rejects the remaining rows.
    let mut import = begin(&control).await;
    import.await_batch().await.expect("the first batch");
    assert_ne!(setting(&control).await, usual);
    let Db::Sqlite { write, .. } = &control.db else { panic!("a file") };
    let reject = "CREATE TRIGGER t BEFORE INSERT ON quotas BEGIN SELECT RAISE(ABORT, 'no'); END";
    sqlx::raw_sql(reject).execute(write).await.expect("a trigger");
    let read = serde_json::from_value(serde_json::json!({"api_key": "k", "tier": "pro"})).expect("a line");
    import.line(4_001, b"", read).await.expect("collected");
    assert!(import.finish().await.is_err());
    assert_eq!((import.imported(), setting(&control).await), (4_000, usual));
    control.close().await;
    for end in ["", "-wal", "-shm"] {
        let _ = std::fs::remove_file(format!("{}{end}", file.display()));
    }
}
