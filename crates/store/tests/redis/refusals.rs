//! Servers that answer and refuse to work: the reason is named, and the breaker does not open and close in turn.

use crate::faults::{Caller, breaker, quick};
use crate::servers::Server;
use std::time::Duration;
use tollgate_store::{BreakerState, RedisConfig, RedisStore};

async fn until(what: &str, store: &RedisStore, mut holds: impl FnMut() -> bool) {
    for _ in 0..3_000 {
        if holds() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("never came: {what}: {:?}", store.status());
}

fn refusals(store: &RedisStore, code: &str) -> u64 {
    let shard = store.status().remove(0);
    shard.refusals.iter().find(|(known, _)| *known == code).map_or(0, |(_, count)| *count)
}

/// Probes that the server has seen.
fn probes(server: &Server) -> u64 {
    let calls = |text: String| text.split([',', '=']).nth(1).and_then(|count| count.parse::<u64>().ok());
    calls(server.info("cmdstat_evalsha")).unwrap_or(0)
}

/// For each way to refuse: the breaker opens, stays open while probes are refused, reports the reason, and closes after.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_refuses_to_work_is_named_and_left_alone() {
    let primary = Server::start(&[]);
    let cases = [
        ("OOM", "CONFIG SET maxmemory 1".to_owned(), "CONFIG SET maxmemory 0"),
        ("NOREPLICAS", "CONFIG SET min-replicas-to-write 1".to_owned(), "CONFIG SET min-replicas-to-write 0"),
        ("READONLY", format!("REPLICAOF 127.0.0.1 {}", primary.port), "REPLICAOF NO ONE"),
        ("NOPERM", "ACL SETUSER default -set".to_owned(), "ACL SETUSER default +set"),
    ];
    let run = |server: &Server, words: &str| {
        let _: () = server.command(&words.split(' ').collect::<Vec<_>>());
    };
    for (code, breaks, repairs) in cases {
        let server = Server::start(&[]);
        let store = RedisStore::connect(quick(&server.url()));
        let mut caller = Caller::new(&store, "alice", 1_000_000);
        caller.heals().await;
        run(&server, &breaks);
        while breaker(&store) == BreakerState::Closed {
            let _ = caller.check().await;
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        let before = probes(&server);
        until("five probes", &store, || {
            assert_ne!(breaker(&store), BreakerState::Closed, "{code}: it was closed by a probe");
            probes(&server) >= before + 5
        })
        .await;
        let shard = store.status().remove(0);
        assert!(shard.error.as_deref().is_some_and(|error| error.contains(code)), "{code}: {shard:?}");
        assert!(refusals(&store, code) > 0, "{code}: {shard:?}");
        run(&server, repairs);
        until("the breaker to close", &store, || breaker(&store) == BreakerState::Closed).await;
        caller.heals().await;
        assert_eq!(store.status()[0].error, None, "{code}");
    }
}

/// A password is changed without restarting nodes: what the file says when the server refuses the old one counts.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_changed_password_is_named_and_read_again() {
    let server = Server::start(&[]);
    let _: () = server.command(&["CONFIG", "SET", "requirepass", "first-secret"]);
    let folder =
        std::env::temp_dir().join(format!("tollgate-password-{}-{}", std::process::id(), server.port));
    std::fs::create_dir_all(&folder).expect("a folder");
    let file = folder.join("password");
    std::fs::write(&file, "first-secret\n").expect("a file");
    let config: RedisConfig = quick(&server.url()).with_password_file(&file).expect("a file");
    let store = RedisStore::connect(config);
    let mut caller = Caller::new(&store, "alice", 1_000_000);
    caller.heals().await;

    let mut admin = redis::Client::open(format!("redis://:first-secret@127.0.0.1:{}", server.port))
        .and_then(|client| client.get_connection())
        .expect("a server");
    let mut run = |words: &[&str]| {
        let mut command = redis::cmd(words[0]);
        command.arg(&words[1..]);
        command.query::<redis::Value>(&mut admin).expect("a command");
    };
    run(&["CONFIG", "SET", "requirepass", "second-secret"]);
    run(&["CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"]);
    while breaker(&store) == BreakerState::Closed {
        let _ = caller.check().await;
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    until("the reason", &store, || refusals(&store, "WRONGPASS") > 0).await;
    let error = store.status()[0].error.clone().unwrap_or_default();
    assert!(error.contains("WRONGPASS") && !error.contains("secret"), "{error}");
    assert_ne!(breaker(&store), BreakerState::Closed);

    std::fs::write(&file, "second-secret\n").expect("a file");
    until("the breaker to close", &store, || breaker(&store) == BreakerState::Closed).await;
    caller.heals().await;
    let _ = std::fs::remove_dir_all(&folder);
}
