//! Impact previews with the samples of all nodes, each of which has seen a part of the traffic.

use crate::databases::Postgres;
use crate::{START, draft, open, operator};
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
    manager: Arc<RuleManager>,
    limiter: Limiter<MemoryStore<Arc<ManualClock>>>,
    clock: Arc<ManualClock>,
    tasks: Vec<JoinHandle<()>>,
}

impl Node {
    async fn start(address: &str, name: &str, counters: CounterSharing) -> Self {
        let (control, clock) = open(address).await;
        let files = || Ok::<_, String>(vec![Source::new("d.yaml", rules("1000/hour"))]);
        let (options, rails) = (Options::default(), Guardrails::default());
        let manager =
            RuleManager::open(Arc::clone(&control), options, RulesFrom::Database, rails, counters, files);
        let manager = manager.expect("rules");
        let store =
            MemoryStore::new(&MemoryConfig::with_bytes(1 << 20), Arc::clone(&clock)).expect("a store");
        let limiter =
            Limiter::new(Arc::clone(&manager.active().rules), store, Arc::clone(&clock) as Arc<dyn Clock>);
        let limiter = limiter.with_observer(manager.sample());
        control.heartbeat(&json!({"name": name})).await.expect("a database");
        let tasks = vec![
            tokio::spawn(Arc::clone(&control).run_sync(SyncConfig::default())),
            tokio::spawn(Arc::clone(&manager).run()),
        ];
        Self { control, manager, limiter, clock, tasks }
    }

    /// Stops the node's background tasks; its heartbeat still counts as live.
    fn stop_tasks(&self) {
        self.tasks.iter().for_each(JoinHandle::abort);
    }

    fn requests(&self, times: u64, pairs: &[(&str, &str)]) {
        for i in 0..times {
            self.clock.set(Timestamp::from_micros(START * 1_000_000 + i * 1_000));
            pollster::block_on(self.limiter.check(&Check::attributes("d", pairs)));
        }
    }

    async fn check(&self, limit: &str) -> ImpactReport {
        let report = self.manager.preview_files(files(limit)).await.expect("a report");
        report.rehearsal.expect("an impact report")
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        self.stop_tasks();
    }
}

fn denied(report: &ImpactReport) -> f64 {
    (report.newly_denied_share * report.weight as f64).round()
}

pub(crate) async fn samples_of_all_nodes_are_replayed(address: String) {
    let one = Node::start(&address, "one", CounterSharing::Shared).await;
    let two = Node::start(&address, "two", CounterSharing::Shared).await;
    // Neither node alone has seen enough to exceed ten.
    one.requests(8, &[("api_key", KEY), ("path", "/")]);
    two.requests(8, &[("api_key", KEY), ("path", "/")]);
    // A caller that the requesting node has never seen, but rules name.
    two.requests(12, &[("user", "carol@example.com")]);
    // Two callers that share a counter by a wildcard.
    two.requests(6, &[("client", "bot-of-erin"), ("path", "/")]);
    two.requests(6, &[("client", "bot-of-frank"), ("path", "/")]);
    let report = one.check("10/hour").await;
    assert_eq!((report.requests, denied(&report)), (40, 10.0), "{report:?}");
    assert_eq!(
        (&report.nodes[..], &report.nodes_silent[..]),
        (&["one".to_owned(), "two".to_owned()][..], &[][..])
    );
    assert!(!report.nodes_unknown);
    // The part of the caller's id behind the mask differs from run to run.
    let masked = |text: &str| text.split_inclusive('…').next().map(str::to_owned).unwrap_or_default();
    let mut top: Vec<_> = report.top.iter().map(|one| (masked(&one.key_masked), one.after_denied)).collect();
    top.sort_unstable();
    let top: Vec<_> = top.iter().map(|(key, denied)| (key.as_str(), *denied)).collect();
    assert_eq!(top, [("api_key=sk_liv…", 6), ("client=bot…", 1), ("client=bo…", 1), ("user=caro…", 2)]);
    // The other node reports the same.
    assert_eq!(denied(&two.check("10/hour").await), 10.0);

    // A live node that does not respond is named, and publishing continues.
    two.stop_tasks();
    let sent =
        PublishRequest { files: files("7/hour"), reason: "less".to_owned(), base_rev: None, confirm: true };
    let PublishResult::Active(_, report) =
        one.manager.publish(sent, &operator()).await.expect("a publication")
    else {
        panic!("it is active")
    };
    let report = report.rehearsal.expect("an impact report");
    assert_eq!(
        (denied(&report), report.nodes, report.nodes_silent),
        (1.0, vec!["one".to_owned()], vec!["two".to_owned()])
    );
}

/// With in-memory counters, eight requests on each of two nodes are sixteen that stay within ten per hour.
pub(crate) async fn per_node_counters_are_replayed_separately(address: String) {
    let one = Node::start(&address, "one", CounterSharing::PerNode).await;
    let two = Node::start(&address, "two", CounterSharing::PerNode).await;
    one.requests(8, &[("api_key", KEY)]);
    two.requests(12, &[("api_key", KEY)]);
    let report = one.check("10/hour").await;
    assert_eq!((report.requests, denied(&report)), (20, 2.0), "{report:?}");
    assert_eq!(report.tenants_affected_share, 1.0);
    assert_eq!(denied(&one.check("6/hour").await), 8.0);
}

/// Returns the contents of the exchange tables.
async fn written(db: &Db) -> (i64, Vec<String>) {
    const BODIES: &str = "SELECT body FROM traffic_told";
    const ASKED: &str = "SELECT COUNT(*) FROM traffic_asked";
    let (bodies, (requests,)): (Vec<(String,)>, (i64,)) = match db {
        Db::Sqlite { read, .. } => (
            sqlx::query_as(BODIES).fetch_all(read).await.expect("rows"),
            sqlx::query_as(ASKED).fetch_one(read).await.expect("a row"),
        ),
        Db::Postgres(pool) => (
            sqlx::query_as(BODIES).fetch_all(pool).await.expect("rows"),
            sqlx::query_as(ASKED).fetch_one(pool).await.expect("a row"),
        ),
    };
    (requests, bodies.into_iter().map(|(body,)| body).collect())
}

pub(crate) async fn no_key_is_written_to_the_database(address: String) {
    let one = Node::start(&address, "one", CounterSharing::Shared).await;
    let two = Node::start(&address, "two", CounterSharing::Shared).await;
    // A node that never responds, so that the other's response stays for a while.
    let (mute, _) = open(&address).await;
    mute.heartbeat(&json!({"name": "mute"})).await.expect("a database");
    two.requests(
        3,
        &[
            ("api_key", KEY),
            ("path", &format!("/a/{KEY}")),
            ("user", "dave@example.com"),
            ("session", "s3cret"),
        ],
    );
    let db = Db::open(&address).await.expect("a database");
    let previewing = {
        let manager = Arc::clone(&one.manager);
        tokio::spawn(async move { manager.preview_files(files("1/hour")).await })
    };
    let body = loop {
        let (_, bodies) = written(&db).await;
        if let Some(body) = bodies.into_iter().next() {
            break body;
        }
        assert!(!previewing.is_finished(), "the response is visible during the request");
        tokio::time::sleep(std::time::Duration::from_millis(5)).await;
    };
    assert!(body.contains("\"path\""), "it contains the requests: {body}");
    for secret in [KEY, &KEY[7..], "dave@", "s3cret"] {
        assert!(!body.contains(secret), "{secret}: {body}");
    }
    let report = previewing.await.expect("an answer").expect("a report");
    let report = report.rehearsal.expect("an impact report");
    assert_eq!((report.requests, &report.nodes_silent[..]), (3, &["mute".to_owned()][..]), "{report:?}");
    assert_eq!(written(&db).await, (0, vec![]), "all rows are deleted");
    db.close().await;
}

pub(crate) async fn quotas_apply_to_callers_of_other_nodes(address: String) {
    let one = Node::start(&address, "one", CounterSharing::Shared).await;
    let two = Node::start(&address, "two", CounterSharing::Shared).await;
    two.requests(5, &[("api_key", KEY)]);
    two.requests(5, &[("api_key", "sk_live_of_somebody_else")]);
    let quota = draft(&json!({"tier": "pro"}));
    let (rules, actor) = (Arc::clone(&one.manager.active().rules), operator());
    let put = one.control.put_quota(KEY, quota, &rules, Precondition::Any, &actor).await;
    put.expect("a database").expect("a quota");
    let report = one.check("1/hour").await;
    assert_eq!((report.requests, denied(&report)), (10, 4.0), "only the other caller's: {report:?}");
}

/// An unavailable database delays nothing, and the report mentions it.
#[test]
#[cfg_attr(not(feature = "external-tests"), ignore = "needs PostgreSQL: make test")]
fn without_the_database_own_traffic_is_replayed() {
    let mut server = Postgres::start();
    let address = server.database("away");
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    runtime.expect("a runtime").block_on(async {
        let one = Node::start(&address, "one", CounterSharing::Shared).await;
        one.requests(5, &[("api_key", KEY)]);
        server.stop("QUIT");
        let report = one.check("1/hour").await;
        assert_eq!((report.requests, denied(&report), report.nodes_unknown), (5, 4.0, true), "{report:?}");
        assert_eq!((report.nodes.len(), report.nodes_silent.len()), (1, 0));
    });
}
