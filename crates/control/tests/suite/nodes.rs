//! Several nodes that share a database.

use crate::{Place, draft, open, operator, rules, until};
use serde_json::{Value, json};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tollgate_control::{
    AdaptationRecord, AdaptationStep, AuditVerification, ControlError, ControlPlane, Precondition, SyncConfig,
};
use tollgate_core::{TimeDelta, Timestamp};

pub(crate) async fn concurrent_starts_migrate_once(address: String) {
    let starting: Vec<_> = (0..6)
        .map(|_| {
            let address = address.clone();
            tokio::spawn(async move { open(&address).await.0 })
        })
        .collect();
    let mut hashes = Vec::new();
    for (i, node) in starting.into_iter().enumerate() {
        let node = node.await.expect("a node that has started");
        let put = node
            .put_quota("key", draft(&json!({"tier": "pro"})), &rules(), Precondition::Any, &operator())
            .await;
        hashes.push(put.expect("a database").expect("a quota").id);
        assert_eq!(node.audit(None, 100).await.expect("an answer").len(), i + 1);
    }
    hashes.dedup();
    assert_eq!(hashes.len(), 1, "all nodes hash keys with the same secret");
}

pub(crate) async fn nodes_are_listed_until_they_deregister(address: String) {
    let (one, _) = open(&address).await;
    let (two, _) = open(&address).await;
    assert!(one.nodes().await.expect("an answer").is_empty());
    // Two nodes with the same name, as on one machine; each sends two heartbeats and is listed once.
    for n in 0..2 {
        one.heartbeat(&json!({"name": "same", "n": n})).await.expect("a database");
        two.heartbeat(&json!({"name": "same", "n": n + 10})).await.expect("a database");
    }
    let seen = one.nodes().await.expect("an answer");
    let mut listed: Vec<_> =
        seen.iter().map(|node| (node.is_self, node.stale, node.report["n"].as_i64())).collect();
    listed.sort_unstable();
    assert_eq!(listed, [(false, false, Some(11)), (true, false, Some(1))]);
    assert_eq!(one.revision(), 0, "a heartbeat is not an operator change");
    two.deregister().await;
    let left = one.nodes().await.expect("an answer");
    assert_eq!(left.iter().map(|node| node.is_self).collect::<Vec<_>>(), [true]);
    // A node that must end during its first heartbeat.
    let beats = std::sync::atomic::AtomicUsize::new(0);
    let report = || json!({"name": "brief", "n": beats.fetch_add(1, std::sync::atomic::Ordering::Relaxed)});
    Arc::clone(&two).run_heartbeat(report, std::future::ready(())).await;
    assert_eq!(beats.into_inner(), 1, "one heartbeat");
    assert_eq!(one.nodes().await.expect("an answer").len(), 1, "deregistered");
}

/// What one node, or a program that follows it, finds hot must reach the others, and end with its traffic.
pub(crate) async fn hot_counters_reach_the_other_nodes(address: String) {
    let (one, first_clock) = open(&address).await;
    let (two, second_clock) = open(&address).await;
    let own = Arc::new(Mutex::new(vec![(7, 2_000)]));
    let received = Arc::new(Mutex::new(Vec::new()));
    let beats = Arc::clone(&one).run_heartbeat(|| json!({"name": "one"}), std::future::pending());
    let (reported, applied) = (Arc::clone(&own), Arc::clone(&received));
    let exchanges = [
        tokio::spawn(
            Arc::clone(&one)
                .run_hot_exchange(move |_| Some(reported.lock().expect("a lock").clone()), |_, _| ()),
        ),
        // It leases nothing itself.
        tokio::spawn(
            Arc::clone(&two)
                .run_hot_exchange(|_| None, move |names, _| *applied.lock().expect("a lock") = names),
        ),
        tokio::spawn(beats),
    ];
    let _ = two.exchange_hot([]);
    until("the counter of the other node", || two.exchange_hot([]).hot == [7]).await;
    // A follower of the second node finds another one.
    assert_eq!(two.exchange_hot([(3, 1_000)]).hot, [3, 7]);
    until("both", || *received.lock().expect("a lock") == [3, 7]).await;
    let listed = one.nodes().await.expect("an answer");
    assert!(!listed.is_empty() && !listed.iter().any(|node| node.report.contains_key("hot")), "{listed:?}");
    // The traffic ends: no node may keep the counter hot, the one that only received the list included.
    own.lock().expect("a lock").clear();
    until("the end", || {
        [&first_clock, &second_clock].iter().for_each(|clock| clock.advance(TimeDelta::from_millis(20)));
        two.exchange_hot([]).hot.is_empty()
    })
    .await;
    exchanges.iter().for_each(tokio::task::JoinHandle::abort);
}

async fn put(node: &ControlPlane, key: &str) {
    let sent = draft(&json!({"tier": "pro"}));
    node.put_quota(key, sent, &rules(), Precondition::Any, &operator())
        .await
        .expect("a database")
        .expect("a quota");
}

pub(crate) async fn two_nodes_converge(address: String) {
    let (one, _) = open(&address).await;
    let (two, _) = open(&address).await;
    // Only notifications can propagate changes: the poll interval is longer than the test.
    let times = SyncConfig { server: Duration::from_secs(3_600), ..SyncConfig::default() };
    let syncing =
        [tokio::spawn(Arc::clone(&one).run_sync(times)), tokio::spawn(Arc::clone(&two).run_sync(times))];
    put(&one, "a").await;
    put(&two, "b").await;
    until("both keys on both nodes", || one.quota_table().len() == 2 && two.quota_table().len() == 2).await;
    one.delete_quota("b", Precondition::Any, &operator()).await.expect("a deletion");
    until("the deletion on both nodes", || one.quota_table().len() == 1 && two.quota_table().len() == 1)
        .await;
    syncing.iter().for_each(tokio::task::JoinHandle::abort);
    // A missed notification: polling is enough.
    put(&one, "c").await;
    two.catch_up().await.expect("an answer");
    assert_eq!(two.quota_table().len(), 2);
    assert_eq!(one.revision(), two.revision());
    // A node that starts later has all of it.
    assert_eq!(open(&address).await.0.quota_table().len(), 2);
}

pub(crate) async fn concurrent_writers_lose_nothing(address: String) {
    let (one, _) = open(&address).await;
    let (two, _) = open(&address).await;
    put(&one, "shared").await;
    let mut writers = Vec::new();
    for node in [&one, &two] {
        for _ in 0..2 {
            let node = Arc::clone(node);
            // Reads, adds one to a number, and writes it back only if it has not changed meanwhile.
            writers.push(tokio::spawn(async move {
                let mut kept_waiting = 0;
                for _ in 0..10 {
                    loop {
                        let found = node.quota("shared").await.expect("an answer").expect("a quota");
                        let count: u64 = found.reason.parse().unwrap_or(0);
                        let sent = draft(&json!({"tier": "pro", "reason": (count + 1).to_string()}));
                        let expected = Precondition::Revision(found.revision);
                        match node.put_quota("shared", sent, &rules(), expected, &operator()).await {
                            Ok(put) => break drop(put.expect("a quota")),
                            Err(ControlError::Conflict) => {}
                            // A busy machine may keep a writer waiting for longer than it may; it has written nothing.
                            Err(ControlError::Unavailable(_)) if kept_waiting < 20 => kept_waiting += 1,
                            Err(error) => panic!("{error}"),
                        }
                    }
                }
            }));
        }
    }
    for writer in writers {
        writer.await.expect("a writer");
    }
    assert_eq!(one.quota("shared").await.expect("an answer").expect("a quota").reason, "40");
    let whole = one.verify_audit().await.expect("an answer");
    assert!(matches!(whole, tollgate_control::AuditVerification::Intact { entries: 41, .. }), "{whole:?}");
}

/// SQLite refuses at once, without its busy timeout, when two connections switch a new file to a write-ahead log; in
/// about one of a hundred such starts.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn concurrent_starts_on_new_sqlite_files_succeed() {
    for n in 0..60 {
        let place = Place::new();
        let address = place.sqlite(&format!("new-{n}"));
        let starting: Vec<_> = (0..8)
            .map(|_| {
                let address = address.clone();
                tokio::spawn(async move { open(&address).await.0.close().await })
            })
            .collect();
        for node in starting {
            node.await.expect("a node that has started");
        }
    }
}

/// A token that may report signals must not be able to make all nodes read their state again.
pub(crate) async fn a_step_of_adapted_limits_is_audited_without_a_revision(address: String) {
    let (one, _) = open(&address).await;
    put(&one, "key").await;
    let before = one.revision();
    let step = |at, percent, signal| AdaptationStep { at: Timestamp::from_secs(at), percent, signal };
    let first = step(5, 80.0, Some(("queue_depth".to_owned(), 140.0, 100.0)));
    let record =
        |from, steps| AdaptationRecord { domain: "api".to_owned(), tier: "free".to_owned(), from, steps };
    let several = record(80.0, vec![step(10, 64.0, first.signal.clone()), step(20, 80.0, None)]);
    for record in [record(100.0, vec![first]), several] {
        one.audit_adaptation(&record, &operator()).await.expect("a database");
    }
    assert!(!one.catch_up().await.expect("a database"), "nothing to read");
    assert_eq!(one.revision(), before);
    let entries = one.audit(None, 100).await.expect("an answer");
    let steps: Vec<_> = entries.iter().rev().filter(|entry| entry.action == "overload.adapt").collect();
    let after: Vec<Value> =
        steps.iter().map(|entry| serde_json::from_str(&entry.after).expect("JSON")).collect();
    let signal = json!({"name": "queue_depth", "value": 140.0, "bound": 100.0});
    assert_eq!(after[0], json!({"percent": 80.0, "signal": signal}));
    let all = json!([
        {"at": "1970-01-01T00:00:10Z", "percent": 64.0, "signal": signal},
        {"at": "1970-01-01T00:00:20Z", "percent": 80.0},
    ]);
    assert_eq!(after[1..], [json!({"percent": 80.0, "steps": all})]);
    assert_eq!(steps[1].before, r#"{"percent":80.0}"#);
    put(&one, "other").await;
    assert_eq!(one.revision(), before + 1);
    assert!(matches!(one.verify_audit().await, Ok(AuditVerification::Intact { entries: 4, .. })));
}
