//! Rules are rehearsed on what all nodes remember, each of which has seen a part of the traffic.

use crate::databases::Postgres;
use crate::{START, draft, open, somebody};
use serde_json::json;
use std::sync::Arc;
use tokio::task::JoinHandle;
use tollgate_control::{
    ControlPlane, Db, Guardrails, ImpactReport, Precondition, PublishRequest, PublishResult, RuleFile,
    RuleManager, RulesFrom, SyncConfig,
};
use tollgate_core::{Clock, ManualClock, Timestamp};
use tollgate_engine::{Check, CounterSharing, Limiter};
use tollgate_rules::{Options, Source};
use tollgate_store::{MemoryConfig, MemoryStore};

const KEY: &str = "sk_live_0123456789abcdef";

fn rules(limit: &str) -> String {
    format!(
        "domain: d\ndescriptors:\n  - key: api_key\n    limit: {limit}\n    tiers: {{pro: 1000/hour}}\n  \
         - key: user\n    value: carol@example.com\n    limit: {limit}\n  \
         - key: client\n    value: \"bot-*\"\n    share_threshold: true\n    limit: {limit}\n"
    )
}

fn files(limit: &str) -> Vec<RuleFile> {
    vec![RuleFile::from(&Source::new("d.yaml", rules(limit)))]
}

struct Node {
    control: Arc<ControlPlane>,
    desk: Arc<RuleManager>,
    limiter: Limiter<MemoryStore<Arc<ManualClock>>>,
    clock: Arc<ManualClock>,
    following: Vec<JoinHandle<()>>,
}

impl Node {
    async fn start(address: &str, name: &str, counters: CounterSharing) -> Self {
        let (control, clock) = open(address).await;
        let files = || Ok::<_, String>(vec![Source::new("d.yaml", rules("1000/hour"))]);
        let (options, rails) = (Options::default(), Guardrails::default());
        let desk =
            RuleManager::open(Arc::clone(&control), options, RulesFrom::Database, rails, counters, files);
        let desk = desk.expect("rules");
        let store =
            MemoryStore::new(&MemoryConfig::with_bytes(1 << 20), Arc::clone(&clock)).expect("a store");
        let limiter =
            Limiter::new(Arc::clone(&desk.active().rules), store, Arc::clone(&clock) as Arc<dyn Clock>);
        let limiter = limiter.with_observer(desk.sample());
        control.heartbeat(&json!({"name": name})).await.expect("a database");
        let following = vec![
            tokio::spawn(Arc::clone(&control).run_sync(SyncConfig::default())),
            tokio::spawn(Arc::clone(&desk).run()),
        ];
        Self { control, desk, limiter, clock, following }
    }

    /// Its listener is gone, though it is alive.
    fn deafen(&self) {
        self.following.iter().for_each(JoinHandle::abort);
    }

    fn asked(&self, times: u64, pairs: &[(&str, &str)]) {
        for i in 0..times {
            self.clock.set(Timestamp::from_micros(START * 1_000_000 + i * 1_000));
            pollster::block_on(self.limiter.check(&Check::attributes("d", pairs)));
        }
    }

    async fn check(&self, limit: &str) -> ImpactReport {
        let report = self.desk.preview_files(files(limit)).await.expect("a report");
        report.rehearsal.expect("a rehearsal")
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        self.deafen();
    }
}

fn denied(told: &ImpactReport) -> f64 {
    (told.newly_denied_share * told.weight as f64).round()
}

pub(crate) async fn what_all_nodes_remember_is_rehearsed_on(address: String) {
    let one = Node::start(&address, "one", CounterSharing::Shared).await;
    let two = Node::start(&address, "two", CounterSharing::Shared).await;
    // Neither has seen so many that ten would be too few.
    one.asked(8, &[("api_key", KEY), ("path", "/")]);
    two.asked(8, &[("api_key", KEY), ("path", "/")]);
    // One whom the asking node has never seen, and rules name.
    two.asked(12, &[("user", "carol@example.com")]);
    // Two who share a counter by a wildcard.
    two.asked(6, &[("client", "bot-of-erin"), ("path", "/")]);
    two.asked(6, &[("client", "bot-of-frank"), ("path", "/")]);
    let told = one.check("10/hour").await;
    assert_eq!((told.requests, denied(&told)), (40, 10.0), "{told:?}");
    assert_eq!(
        (&told.nodes[..], &told.nodes_silent[..]),
        (&["one".to_owned(), "two".to_owned()][..], &[][..])
    );
    assert!(!told.nodes_unknown);
    let mut top: Vec<_> = told.top.iter().map(|one| (one.key_masked.as_str(), one.after_denied)).collect();
    top.sort_unstable();
    assert_eq!(top, [("api_key=sk_liv…", 6), ("client=bot…", 1), ("client=bo…", 1), ("user=caro…", 2)]);
    // Asked of the other it is the same.
    assert_eq!(denied(&two.check("10/hour").await), 10.0);

    // One that is alive and does not answer is named, and publishing goes on.
    two.deafen();
    let sent =
        PublishRequest { files: files("7/hour"), reason: "less".to_owned(), base_rev: None, confirm: true };
    let PublishResult::Active(_, report) = one.desk.publish(sent, &somebody()).await.expect("a publication")
    else {
        panic!("it acts")
    };
    let told = report.rehearsal.expect("a rehearsal");
    assert_eq!(
        (denied(&told), told.nodes, told.nodes_silent),
        (1.0, vec!["one".to_owned()], vec!["two".to_owned()])
    );
}

/// With counters in memory eight requests on each of two nodes are sixteen that pass ten an hour.
pub(crate) async fn counters_of_each_node_are_rehearsed_apart(address: String) {
    let one = Node::start(&address, "one", CounterSharing::PerNode).await;
    let two = Node::start(&address, "two", CounterSharing::PerNode).await;
    one.asked(8, &[("api_key", KEY)]);
    two.asked(12, &[("api_key", KEY)]);
    let told = one.check("10/hour").await;
    assert_eq!((told.requests, denied(&told)), (20, 2.0), "{told:?}");
    assert_eq!(told.tenants_affected_share, 1.0);
    assert_eq!(denied(&one.check("6/hour").await), 8.0);
}

/// All that stands in the tables.
async fn written(db: &Db) -> (i64, Vec<String>) {
    const BODIES: &str = "SELECT body FROM traffic_told";
    const ASKED: &str = "SELECT COUNT(*) FROM traffic_asked";
    let (bodies, (asked,)): (Vec<(String,)>, (i64,)) = match db {
        Db::Sqlite { read, .. } => (
            sqlx::query_as(BODIES).fetch_all(read).await.expect("rows"),
            sqlx::query_as(ASKED).fetch_one(read).await.expect("a row"),
        ),
        Db::Postgres(pool) => (
            sqlx::query_as(BODIES).fetch_all(pool).await.expect("rows"),
            sqlx::query_as(ASKED).fetch_one(pool).await.expect("a row"),
        ),
    };
    (asked, bodies.into_iter().map(|(body,)| body).collect())
}

pub(crate) async fn no_key_is_written_for_others(address: String) {
    let one = Node::start(&address, "one", CounterSharing::Shared).await;
    let two = Node::start(&address, "two", CounterSharing::Shared).await;
    // One that never answers: so what the other told stays for a while.
    let (mute, _) = open(&address).await;
    mute.heartbeat(&json!({"name": "mute"})).await.expect("a database");
    two.asked(
        3,
        &[
            ("api_key", KEY),
            ("path", &format!("/a/{KEY}")),
            ("user", "dave@example.com"),
            ("session", "s3cret"),
        ],
    );
    let db = Db::open(&address).await.expect("a database");
    let asking = {
        let desk = Arc::clone(&one.desk);
        tokio::spawn(async move { desk.preview_files(files("1/hour")).await })
    };
    let body = loop {
        let (_, bodies) = written(&db).await;
        if let Some(body) = bodies.into_iter().next() {
            break body;
        }
        assert!(!asking.is_finished(), "what is told is seen while somebody asks");
        tokio::time::sleep(std::time::Duration::from_millis(5)).await;
    };
    assert!(body.contains("\"path\""), "it is what was asked: {body}");
    for secret in [KEY, &KEY[7..], "dave@", "s3cret"] {
        assert!(!body.contains(secret), "{secret}: {body}");
    }
    let report = asking.await.expect("an answer").expect("a report");
    let told = report.rehearsal.expect("a rehearsal");
    assert_eq!((told.requests, &told.nodes_silent[..]), (3, &["mute".to_owned()][..]), "{told:?}");
    assert_eq!(written(&db).await, (0, vec![]), "and nothing of it stays");
    db.close().await;
}

pub(crate) async fn agreements_act_on_callers_whom_another_node_has_seen(address: String) {
    let one = Node::start(&address, "one", CounterSharing::Shared).await;
    let two = Node::start(&address, "two", CounterSharing::Shared).await;
    two.asked(5, &[("api_key", KEY)]);
    two.asked(5, &[("api_key", "sk_live_of_somebody_else")]);
    let agreed = draft(&json!({"tier": "pro"}));
    let (rules, who) = (Arc::clone(&one.desk.active().rules), somebody());
    let put = one.control.put_quota(KEY, agreed, &rules, Precondition::Any, &who).await;
    put.expect("a database").expect("a quota");
    let told = one.check("1/hour").await;
    assert_eq!((told.requests, denied(&told)), (10, 4.0), "the other's alone: {told:?}");
}

/// A database that is away makes nobody wait, and its absence is told.
#[test]
#[cfg_attr(not(feature = "external-tests"), ignore = "needs PostgreSQL: make test")]
fn without_the_database_own_traffic_is_rehearsed_on() {
    let mut server = Postgres::start();
    let address = server.database("away");
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    runtime.expect("a runtime").block_on(async {
        let one = Node::start(&address, "one", CounterSharing::Shared).await;
        one.asked(5, &[("api_key", KEY)]);
        server.stop("QUIT");
        let told = one.check("1/hour").await;
        assert_eq!((told.requests, denied(&told), told.nodes_unknown), (5, 4.0, true), "{told:?}");
        assert_eq!((told.nodes.len(), told.nodes_silent.len()), (1, 0));
    });
}
