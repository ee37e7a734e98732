//! TLS and a password: an unauthenticated client gets no data.

use crate::cluster::Cluster;
use crate::cluster_faults::name_at;
use crate::faults::{Caller, quick};
use crate::servers::Server;
use std::path::Path;
use std::process::Command;
use tollgate_core::{
    Admission, Algorithm, Charge, Cost, CounterKey, CounterStore, KeyPart, LimitSpec, Rate, Scope, TimeDelta,
};
use tollgate_store::RedisStore;

/// Says to a child of this test where the server is.
const PORT: &str = "TOLLGATE_TEST_TLS_PORT";

fn openssl(folder: &Path, words: &str) {
    let made = Command::new("openssl").args(words.split(' ')).current_dir(folder).output();
    assert!(made.is_ok_and(|made| made.status.success()), "openssl {words}");
}

/// Runs `as_a_client` in a process of its own, which trusts the certificates in this file.
fn client(port: u16, trusted: &Path) -> bool {
    let this = std::env::current_exe().expect("this test");
    let mut child = Command::new(this);
    child.args(["--exact", "tls::as_a_client"]).env(PORT, port.to_string()).env("SSL_CERT_FILE", trusted);
    child.output().expect("a child").status.success()
}

#[tokio::test]
async fn as_a_client() {
    let Ok(port) = std::env::var(PORT) else { return };
    let mut config =
        quick(&format!("rediss://localhost:{port}")).with_credentials(None, Some("sesame".to_owned()));
    config.deadline = std::time::Duration::from_secs(5);
    config.connect_timeout = config.deadline;
    let store = RedisStore::connect(config);
    assert_eq!(Caller::new(&store, "alice", 1).check().await, Ok(Admission::Admitted));
}

#[test]
fn only_trusted_certificates_are_accepted() {
    let folder = std::env::temp_dir().join(format!("tollgate-redis-{}-tls", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a folder");
    for name in ["ca", "other"] {
        openssl(
            &folder,
            &format!(
                "req -x509 -newkey rsa:2048 -nodes -keyout {name}.key -out {name}.crt -days 2 -subj /CN={name}"
            ),
        );
    }
    openssl(&folder, "req -newkey rsa:2048 -nodes -keyout server.key -out server.csr -subj /CN=localhost");
    std::fs::write(folder.join("names"), "subjectAltName=DNS:localhost\n").expect("a file");
    openssl(
        &folder,
        "x509 -req -in server.csr -CA ca.crt -CAkey ca.key -CAcreateserial -days 2 -extfile names -out server.crt",
    );
    let at = |name: &str| folder.join(name).display().to_string();
    let tls_port = crate::servers::free_port();
    let port = tls_port.to_string();
    let (certificate, key, authority) = (at("server.crt"), at("server.key"), at("ca.crt"));
    let server = Server::start(&[
        "--tls-port",
        &port,
        "--tls-cert-file",
        &certificate,
        "--tls-key-file",
        &key,
        "--tls-ca-cert-file",
        &authority,
        "--tls-auth-clients",
        "no",
    ]);
    let _: () = server.command(&["CONFIG", "SET", "requirepass", "sesame"]);
    assert!(client(tls_port, &folder.join("ca.crt")));
    assert!(!client(tls_port, &folder.join("other.crt")));
    let _ = std::fs::remove_dir_all(&folder);
}

/// A user with the rights that docs/deployment/redis.md names, and no more, is enough.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_user_needs_only_the_documented_permissions() {
    let documented = include_str!("../../../../docs/deployment/redis.md");
    let rights = documented.lines().find_map(|line| line.strip_prefix("ACL SETUSER gate on >password "));
    let rights = format!("on >sesame {}", rights.expect("the rights"));
    let grant = |server: &Server, more: &str| {
        let words = format!("ACL SETUSER gate {rights} {more}");
        let _: () = server.command(&words.split(' ').collect::<Vec<_>>());
    };
    let server = Server::start(&[]);
    grant(&server, "+select");
    let by_user = |url: String| url.replacen("://", "://gate:sesame@", 1);
    let store = RedisStore::connect(quick(&format!("{}/3", by_user(server.url()))));
    Caller::new(&store, "alice", 5).heals().await;
    // A window that goes on is written by another command than one that begins.
    let (hour, scope) = (Rate::per(5, TimeDelta::from_secs(3_600)), "d|k|fixed_window|1h");
    let window = LimitSpec::new(Algorithm::FixedWindow, hour).build().expect("a limit");
    let (scope, parts) = (Scope::in_group(scope, "d|k"), [KeyPart::Text("alice")]);
    for _ in 0..3 {
        let key = CounterKey { scope: &scope, parts: &parts };
        store.charge(&[Charge::new(key, &window, Cost::ONE)]).await.expect("its rights suffice");
    }
    assert!(server.info("cmdstat_incrby").starts_with("calls="), "a window in its short form");
    let cluster = Cluster::with_replicas(0);
    for server in &cluster.servers {
        grant(server, "+asking +cluster|slots");
    }
    let store = RedisStore::connect(quick(&by_user(cluster.url())));
    for primary in 0..3 {
        Caller::new(&store, &name_at(&cluster, primary), 5).heals().await;
    }
    // A slot on its way: the first question at its new place is asked with leave.
    let name = name_at(&cluster, 0);
    let slot = cluster.servers[0].command::<u32>(&["CLUSTER", "KEYSLOT", &name]).to_string();
    let id = |server: usize| cluster.servers[server].command::<String>(&["CLUSTER", "MYID"]);
    let (source, target) = (id(0), id(1));
    let _: () = cluster.servers[1].command(&["CLUSTER", "SETSLOT", &slot, "IMPORTING", &source]);
    let _: () = cluster.servers[0].command(&["CLUSTER", "SETSLOT", &slot, "MIGRATING", &target]);
    let _: () = cluster.servers[0].command(&["FLUSHALL"]);
    Caller::new(&store, &name, 5).heals().await;
    assert!(cluster.servers[0].info("errorstat_ASK").starts_with("count="), "the server's own words");
    for server in [&server, &cluster.servers[0], &cluster.servers[1], &cluster.servers[2]] {
        assert_eq!(server.info("errorstat_NOPERM"), "", "nothing was refused");
    }
}
