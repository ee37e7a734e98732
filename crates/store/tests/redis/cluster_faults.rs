//! What a check sees while a cluster fails or changes for real.

use crate::cluster::Cluster;
use crate::faults::{Caller, PATIENCE, answered, quick};
use crate::servers::{patient, wait_until};
use tollgate_core::{
    Admission, Algorithm, Charge, Cost, CounterKey, CounterStore, KeyPart, LimitSpec, Rate, Scope,
    StoreError, nonzero,
};
use tollgate_store::RedisStore;

/// A tenant's name whose slot the primary with this number has at the start.
pub(crate) fn name_at(cluster: &Cluster, primary: usize) -> String {
    let slot = |name: &str| cluster.servers[1].command::<u32>(&["CLUSTER", "KEYSLOT", name]);
    let bounds = [0, 5461, 10_923, 16_384];
    (0..)
        .map(|number| format!("tenant{number}"))
        .find(|name| (bounds[primary]..bounds[primary + 1]).contains(&slot(name)))
        .expect("a name for every slot")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dead_shard_affects_only_its_own_keys() {
    let mut cluster = Cluster::with_replicas(0);
    let store = RedisStore::connect(answered(&cluster.url()));
    let names = [name_at(&cluster, 0), name_at(&cluster, 1), name_at(&cluster, 2)];
    let mut tenants: Vec<Caller> = names.iter().map(|name| Caller::new(&store, name, 500)).collect();
    for tenant in &mut tenants {
        tenant.heals().await;
    }
    cluster.servers[0].kill();
    for _ in 0..100 {
        assert!(tenants[0].check().await.is_err());
        assert_eq!(tenants[1].check().await, Ok(Admission::Admitted));
        assert_eq!(tenants[2].check().await, Ok(Admission::Admitted));
    }
    for tenant in &mut tenants {
        tenant.deadline = PATIENCE;
        tenant.waited_no_longer_than_it_may();
    }
    // A request that spans a dead shard and a living one names the charges that failed, and takes none of the others.
    let limit = LimitSpec::new(Algorithm::Gcra, Rate::per_day(nonzero!(5))).build().expect("a limit");
    let scope = Scope::new("spanning");
    let (dead, living) = ([KeyPart::Text(&names[0])], [KeyPart::Text(&names[1])]);
    let charge = |parts| Charge::new(CounterKey { scope: &scope, parts }, &limit, Cost::ONE);
    for _ in 0..10 {
        let both = store.charge(&[charge(&living), charge(&dead)]).await;
        assert!(matches!(&both, Err(StoreError::Partial { failed, .. }) if *failed == [1]), "{both:?}");
    }
    let alone = store.charge(&[charge(&living)]).await.expect("the living shard");
    assert_eq!(alone.per_charge[0].remaining, 4);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_replica_that_takes_over_is_found() {
    let mut cluster = Cluster::start();
    let store = RedisStore::connect(quick(&cluster.url()));
    let mut tenant = Caller::new(&store, &name_at(&cluster, 0), 40);
    tenant.heals().await;
    // By hand: nothing is lost.
    let role = |server: usize| cluster.servers[server].info("role");
    cluster.fail_over(3);
    wait_until("the replica is primary", || role(3) == "master" && role(0) == "slave");
    for _ in 0..10 {
        tenant.heals().await;
    }
    let before = tenant.admitted;
    assert_eq!(before, 11, "every answered check was admitted, and counted once");
    // By force: the cluster notices, and what its new primary does not know is said to be lost.
    wait_until("the old primary follows", || cluster.servers[0].info("master_link_status").starts_with("up"));
    cluster.servers[3].kill();
    while tenant.check().await.is_ok() {}
    tenant.heals().await;
    let successor = format!("127.0.0.1:{}", cluster.servers[0].port);
    let status = store.status();
    let shard = status.iter().find(|shard| shard.address == successor).expect("the successor");
    assert!(shard.lost_writes_at.is_some(), "{status:?}");
    while tenant.check().await == Ok(Admission::Admitted) {}
    assert!(tenant.admitted <= 40, "{}", tenant.admitted);
    tenant.waited_no_longer_than_it_may();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slot_that_moves_keeps_its_counters() {
    let cluster = Cluster::with_replicas(0);
    // Patient: a check that is not waited for may have been taken all the same.
    let store = RedisStore::connect(patient(&cluster.url()));
    let name = name_at(&cluster, 0);
    let mut tenant = Caller::new(&store, &name, 30);
    for _ in 0..5 {
        tenant.heals().await;
    }
    let (from, to) = (&cluster.servers[0], &cluster.servers[1]);
    let id = |server: usize| cluster.servers[server].command::<String>(&["CLUSTER", "MYID"]);
    let (source, target) = (id(0), id(1));
    let slot = from.command::<u32>(&["CLUSTER", "KEYSLOT", &name]).to_string();
    let _: () = to.command(&["CLUSTER", "SETSLOT", &slot, "IMPORTING", &source]);
    let _: () = from.command(&["CLUSTER", "SETSLOT", &slot, "MIGRATING", &target]);
    for _ in 0..5 {
        assert_eq!(tenant.check().await, Ok(Admission::Admitted), "the key is still at its source");
    }
    let keys: Vec<String> = from.command(&["CLUSTER", "GETKEYSINSLOT", &slot, "100"]);
    for key in &keys {
        let port = to.port.to_string();
        let _: () = from.command(&["MIGRATE", "127.0.0.1", &port, key, "0", "1000"]);
    }
    for _ in 0..5 {
        assert_eq!(tenant.check().await, Ok(Admission::Admitted), "the source says: ask the target");
    }
    for server in [to, from, &cluster.servers[2]] {
        let _: () = server.command(&["CLUSTER", "SETSLOT", &slot, "NODE", &target]);
    }
    while tenant.check().await == Ok(Admission::Admitted) {}
    assert_eq!(tenant.admitted, 30, "no more and no fewer than without the move");
}

/// A cluster that serves nothing unless all its slots are served, and has lost some.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cluster_that_is_down_admits_nothing_and_heals() {
    let mut cluster = Cluster::with_replicas(0);
    let store = RedisStore::connect(quick(&cluster.url()));
    let mut tenant = Caller::new(&store, &name_at(&cluster, 0), 30);
    for _ in 0..5 {
        tenant.heals().await;
    }
    let cover = |cluster: &Cluster, whole: &str| {
        for server in &cluster.servers[..2] {
            let _: () = server.command(&["CONFIG", "SET", "cluster-require-full-coverage", whole]);
        }
    };
    cover(&cluster, "yes");
    cluster.servers[2].kill();
    wait_until("the cluster is down", || cluster.servers[0].cluster_info("cluster_state") == "fail");
    let before = tenant.admitted;
    for _ in 0..5 {
        assert!(tenant.check().await.is_err());
    }
    let statistic = cluster.servers[0].info("errorstat_CLUSTERDOWN");
    assert!(statistic.starts_with("count="), "the server's own words");
    assert_eq!(tenant.admitted, before);
    cover(&cluster, "no");
    wait_until("the cluster is well", || cluster.servers[0].cluster_info("cluster_state") == "ok");
    tenant.heals().await;
    while tenant.check().await != Ok(Admission::Denied) {}
    assert!(tenant.admitted <= 30, "{}", tenant.admitted);
}

/// Two keys of a request, of which one has already moved: the server says TRYAGAIN until both have.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_whose_keys_are_on_the_move_waits_and_is_counted_once() {
    let cluster = Cluster::with_replicas(0);
    // Patient: a check that is not waited for may have been taken all the same, and is made again here.
    let mut config = answered(&cluster.url());
    config.breaker.failures = usize::MAX;
    let store = RedisStore::connect(config);
    let name = name_at(&cluster, 0);
    let limit = LimitSpec::new(Algorithm::FixedWindow, Rate::per_day(nonzero!(8))).build().expect("a limit");
    let (one, other) = (Scope::new("moving|tenant"), Scope::new("moving|tenant|user"));
    let (tenant, user) = ([KeyPart::Text(&name)], [KeyPart::Text(&name), KeyPart::Text("alice")]);
    let charges = [
        Charge::new(CounterKey { scope: &one, parts: &tenant }, &limit, Cost::ONE),
        Charge::new(CounterKey { scope: &other, parts: &user }, &limit, Cost::ONE),
    ];
    let served = async || loop {
        match store.charge(&charges).await {
            Ok(outcomes) => return outcomes,
            Err(why) => assert!(!matches!(why, StoreError::Partial { .. }), "{why}"),
        }
    };
    assert_eq!(served().await.per_charge[0].remaining, 7);
    let (from, to) = (&cluster.servers[0], &cluster.servers[1]);
    let id = |server: usize| cluster.servers[server].command::<String>(&["CLUSTER", "MYID"]);
    let (source, target) = (id(0), id(1));
    let slot = from.command::<u32>(&["CLUSTER", "KEYSLOT", &name]).to_string();
    let _: () = to.command(&["CLUSTER", "SETSLOT", &slot, "IMPORTING", &source]);
    let _: () = from.command(&["CLUSTER", "SETSLOT", &slot, "MIGRATING", &target]);
    let keys: Vec<String> = from.command(&["CLUSTER", "GETKEYSINSLOT", &slot, "100"]);
    assert_eq!(keys.len(), 2);
    let port = to.port.to_string();
    let migrate = |key: &str| {
        let _: () = from.command(&["MIGRATE", "127.0.0.1", &port, key, "0", "1000"]);
    };
    migrate(&keys[0]);
    assert!(store.charge(&charges).await.is_err(), "half of its keys are elsewhere");
    assert!(from.info("errorstat_TRYAGAIN").starts_with("count="), "the server's own words");
    migrate(&keys[1]);
    assert!(served().await.admission == Admission::Admitted, "both are at the target: it is asked");
    for server in [to, from, &cluster.servers[2]] {
        let _: () = server.command(&["CLUSTER", "SETSLOT", &slot, "NODE", &target]);
    }
    let mut admitted = 2;
    while served().await.admission == Admission::Admitted {
        admitted += 1;
    }
    assert_eq!(admitted, 8, "no more and no fewer than without the move");
}
