//! Two real Envoys share one limit by quota streams, with the configuration that the documentation shows: together they
//! stay within it, use it as demand moves, and come back after the server was killed.

use crate::harness::{
    Envoy, Folder, ForeignServer, Server, Service, Stopwatch, WebConnection, eventually, exchange, note,
};
use serde_json::Value;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

/// Rate per second and burst of the example's limit.
const RATE: f64 = 40.0;
const BURST: f64 = 400.0;
/// Envoy's report interval.
const INTERVAL: Duration = Duration::from_secs(5);
/// Pauses between the requests of a busy client and of a quiet one.
const BUSY: u64 = 8;
const QUIET: u64 = 300;

fn example(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/envoy-quota").join(name);
    path.to_str().expect("a plain path").to_owned()
}

/// An Envoy, and a client that sends requests to it with a pause in milliseconds.
struct Edge {
    envoy: Envoy,
    pause: Arc<AtomicU64>,
    is_over: Arc<AtomicBool>,
    client: Option<JoinHandle<()>>,
    _folder: Folder,
}

impl Edge {
    fn start(grpc: SocketAddr, service: &Service, allowed: &Arc<AtomicU64>, pause: u64) -> Self {
        let mut config = std::fs::read_to_string(example("envoy.yaml")).expect("the example");
        let changes = [
            ("port_value: 10000", "port_value: 0".to_owned()),
            ("port_value: 9901", "port_value: 0".to_owned()),
            ("port_value: 9000", format!("port_value: {}", service.address.port())),
            ("port_value: 8081", format!("port_value: {}", grpc.port())),
        ];
        for (from, to) in changes {
            assert_eq!(config.matches(from).count(), 1, "`{from}` in the example");
            config = config.replace(from, &to);
        }
        let folder = Folder::new();
        let path = folder.write("envoy.yaml", config);
        let admin_path = folder.join("admin");
        let mut address = None;
        let envoy = Envoy::start(&path, &admin_path, || {
            let admin = std::fs::read_to_string(&admin_path).ok().and_then(|text| text.trim().parse().ok());
            address = admin.and_then(listening);
            address.is_some()
        });
        let address = address.expect("it listens");
        let (pause, is_over) = (Arc::new(AtomicU64::new(pause)), Arc::new(AtomicBool::new(false)));
        let (own_pause, own_end, allowed) = (Arc::clone(&pause), Arc::clone(&is_over), Arc::clone(allowed));
        let client = std::thread::spawn(move || {
            let mut open = WebConnection::to(address).expect("a connection");
            while !own_end.load(Ordering::Relaxed) {
                let _ = open.send(b"GET / HTTP/1.1\r\nhost: edge\r\nx-tenant: a\r\n\r\n");
                match open.response() {
                    Ok(response) => {
                        assert!([200, 429].contains(&response.status), "{}", response.status);
                        allowed.fetch_add(u64::from(response.status == 200), Ordering::Relaxed);
                    }
                    Err(_) => open = WebConnection::to(address).expect("a connection"),
                }
                // The pace of demand, which nothing waits for.
                std::thread::sleep(Duration::from_millis(own_pause.load(Ordering::Relaxed)));
            }
        });
        Self { envoy, pause, is_over, client: Some(client), _folder: folder }
    }

    fn demand(&self, pause: u64) {
        self.pause.store(pause, Ordering::Relaxed);
    }
}

impl Drop for Edge {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Relaxed);
        if let Some(client) = self.client.take()
            && client.join().is_err()
        {
            note(&self.envoy.log());
        }
    }
}

fn listening(admin: SocketAddr) -> Option<SocketAddr> {
    let request = b"GET /listeners?format=json HTTP/1.1\r\nhost: admin\r\nconnection: close\r\n\r\n";
    let listeners: Value = serde_json::from_slice(&exchange(admin, request).ok()?.body).ok()?;
    let bound = &listeners["listener_statuses"][0]["local_address"]["socket_address"];
    format!("{}:{}", bound["address"].as_str()?, bound["port_value"]).parse().ok()
}

/// Returns the requests per second that pass during `time`, which must go by to be measured.
fn rate_during(time: Duration, allowed: &AtomicU64) -> f64 {
    let (watch, before) = (Stopwatch::start(), allowed.load(Ordering::Relaxed));
    std::thread::sleep(time);
    (allowed.load(Ordering::Relaxed) - before) as f64 / watch.elapsed().as_secs_f64()
}

fn metric(server: &Server, name: &str) -> f64 {
    let page = server.get("/metrics").text();
    let line = page.lines().find(|line| line.starts_with(name) && line[name.len()..].starts_with(' '));
    line.and_then(|line| line.rsplit(' ').next()?.parse().ok()).unwrap_or(0.0)
}

/// What quota servers without counters do, as the ones of others: each Envoy has the whole limit.
#[test]
fn static_assignments_give_each_envoy_the_whole_limit() {
    let quotas = ForeignServer::start("static_quota.py", &[&RATE.to_string()]);
    let (service, allowed) = (Service::start(), Arc::new(AtomicU64::new(0)));
    let _both = [(); 2].map(|()| Edge::start(quotas.address, &service, &allowed, BUSY));
    eventually("both assignments", || (allowed.load(Ordering::Relaxed) > 100).then_some(()));
    // Unless this machine is too busy to send as much.
    let used = eventually("more than the limit", || {
        let used = rate_during(Duration::from_secs(2), &allowed) / RATE;
        (used >= 1.7).then_some(used)
    });
    note(&format!("{used:.2} times the limit passes two Envoys with static assignments"));
}

/// A server with static assignments lets two Envoys pass twice the limit, as above.
#[test]
fn two_envoys_share_one_limit_and_survive_a_restart() {
    let start = |grpc: &str| {
        let environment = [("TOLLGATE_HTTP", "127.0.0.1:0"), ("TOLLGATE_GRPC", grpc)];
        Server::start_with(&["--rules", &example("rules.yaml")], &environment)
    };
    let server = start(&tollgate_testing::ports::free_address().to_string());
    let (grpc, service, allowed) = (server.grpc, Service::start(), Arc::new(AtomicU64::new(0)));
    let watch = Stopwatch::start();
    let first = Edge::start(grpc, &service, &allowed, BUSY);
    let second = Edge::start(grpc, &service, &allowed, QUIET);
    eventually("both streams", || (metric(&server, "ratelimit_rlqs_streams") >= 2.0).then_some(()));
    // A burst is used up when what passes no longer exceeds the rate.
    eventually("the end of the burst", || {
        let rate = rate_during(Duration::from_secs(2), &allowed);
        (allowed.load(Ordering::Relaxed) > 500 && rate <= RATE * 1.2).then_some(())
    });
    first.demand(QUIET);
    second.demand(BUSY);
    // After two intervals, unless this machine is too busy to send as much as the limit.
    std::thread::sleep(2 * INTERVAL);
    let used = eventually("the limit in use by the other Envoy", || {
        let used = rate_during(INTERVAL, &allowed) / RATE;
        (used >= 0.9).then_some(used)
    });
    let (total, time) = (allowed.load(Ordering::Relaxed) as f64, watch.elapsed().as_secs_f64());
    note(&format!("{used:.3} of the limit used; {total} requests in {time:.1} s"));
    assert!(total <= BURST + RATE * time, "{total} in {time} s");
    assert!(server.get("/metrics").text().contains("ratelimit_rlqs_outstanding_units"));

    // Killed: assignments last for their time, and then nothing passes. Back: streams subscribe again.
    server.signal("KILL");
    drop(server);
    let server = start(&grpc.to_string());
    eventually("both streams again", || (metric(&server, "ratelimit_rlqs_streams") >= 2.0).then_some(()));
    let before = allowed.load(Ordering::Relaxed);
    eventually("requests", || (allowed.load(Ordering::Relaxed) > before + 20).then_some(()));
}
