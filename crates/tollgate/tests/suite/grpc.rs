//! Envoy's rate limit service, called by a third-party client (`foreign/*.py`).

use crate::harness::{Foreign, Server, Stopwatch, eventually, foreign_client, note};
use std::time::Duration;

const RULES: &str = "
domain: d
descriptors:
  - key: key
    rate_limit: {name: three, unit: hour, requests_per_unit: 3}
    metadata: {team: payments, owner: {name: ada, pager: [1, {night: true}], none: null}}
    descriptors:
      - {key: sub, rate_limit: {unit: day, requests_per_unit: 100}}
  - key: free
    rate_limit: {unlimited: true}
  - key: many
    rate_limit: {unit: day, requests_per_unit: 100}
";

/// Users' proxies speak this protocol as Envoy defines it, not as we read it.
#[test]
fn a_foreign_client_finds_the_protocol_as_envoy_has_it() {
    let server = Server::with_rules(RULES);
    let report = foreign_client("rls.py", &server);
    note(&report);
    assert!(report.ends_with(" passed, 0 failed\n"), "{report}");
    assert_eq!(server.get("/healthz").status, 200);
}

/// Load balancers take a server out when its health says so; a watcher must not keep it from ending.
#[test]
fn a_health_watcher_sees_the_shutdown_and_does_not_delay_it() {
    let mut server = Server::with_rules(RULES);
    let watcher = Foreign::start("drain.py", &server);
    eventually("the watcher", || watcher.output().contains("SERVING\n").then_some(()));
    let watch = Stopwatch::start();
    server.signal("TERM");
    let output = watcher.finish(&server);
    assert!(output.ends_with("NOT_SERVING\n"), "{output}");
    assert_eq!(server.wait().code(), Some(0), "{}", server.log());
    note(&format!("ended after {} ms", watch.elapsed().as_millis()));
    assert!(watch.elapsed() < Duration::from_secs(10), "{:?}", watch.elapsed());
}
