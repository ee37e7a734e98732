//! Three Tollgate nodes, each a region with its counters in memory.

use super::far_link::FarLink;
use super::nodes::{Api, Nodes, Scratch};
use super::{LIMIT, NODES};
use crate::process::{Server, free_port, tollgate_binary};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

const REGIONS: [&str; NODES] = ["eu", "us", "ap"];

/// Returns the rule of the scenario.
pub(super) fn window(mode: &str) -> String {
    rule(mode, &format!("{{count: {LIMIT}, period: 10s, algorithm: fixed_window}}"))
}

/// Returns a rule with this limit; the owner, if there is one, is the first node.
pub(super) fn rule(mode: &str, limit: &str) -> String {
    let region = match mode {
        "owner" | "leased" => format!("{{mode: {mode}, owner: eu}}"),
        mode => mode.to_owned(),
    };
    format!("domain: d\ndescriptors:\n  - {{key: k, limit: {limit}, on_error: closed, region: {region}}}\n")
}

/// Starts three nodes that are each other's peers.
pub(super) fn start(rules: &str, trip: Duration) -> Result<Nodes, String> {
    let nodes = launch(rules, Some(trip))?;
    nodes.wait_until(|nodes, node| nodes.metric(node, "ratelimit_region_share ") == [1.0])?;
    Ok(nodes)
}

/// Starts three nodes that do not know each other.
pub(super) fn start_alone(rules: &str) -> Result<Nodes, String> {
    let nodes = launch(rules, None)?;
    nodes.wait_until(|nodes, node| !nodes.metric(node, "ratelimit_").is_empty())?;
    Ok(nodes)
}

fn launch(rules: &str, trip: Option<Duration>) -> Result<Nodes, String> {
    static FILES: AtomicU64 = AtomicU64::new(0);
    let myself = std::env::current_exe().map_err(|error| error.to_string())?;
    let binary = tollgate_binary(&myself)?;
    let file = FILES.fetch_add(1, Ordering::Relaxed);
    let path = std::env::temp_dir().join(format!("tollgate-bench-cells-{}-{file}.yaml", std::process::id()));
    std::fs::write(&path, rules).map_err(|error| error.to_string())?;
    let scratch = Scratch(path);
    let ports: Vec<String> = (0..NODES).map(|_| free_port()).collect::<Result<_, _>>()?;
    let (mut servers, mut addresses, mut links) = (Vec::new(), Vec::new(), Vec::new());
    for (node, port) in ports.iter().enumerate() {
        let http = format!("127.0.0.1:{}", free_port()?);
        let rules = scratch.0.display().to_string();
        let mut flags: Vec<String> =
            ["serve", "--store", "memory", "--grpc", "off", "--resp", "127.0.0.1:0", "--admin", "off"]
                .map(str::to_owned)
                .to_vec();
        flags.extend(["--http", &http, "--rules", &rules].map(str::to_owned));
        if let Some(trip) = trip {
            let cell = format!("127.0.0.1:{port}");
            flags.extend(["--cell-deadline-ms", "2000", "--region", REGIONS[node]].map(str::to_owned));
            flags.extend(["--cell", &cell].map(str::to_owned));
            for (other, port) in ports.iter().enumerate().filter(|(other, _)| *other != node) {
                let port = port.parse().map_err(|_| "a port".to_owned())?;
                let link = FarLink::to(port, trip);
                flags.extend(["--peer".to_owned(), format!("{}=http://{}", REGIONS[other], link.address)]);
                links.push(link);
            }
        }
        let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
        servers.push(Server::start_anywhere(&binary, &flags, "resp")?);
        addresses.push(http);
    }
    let failed = AtomicU64::new(0);
    Ok(Nodes { servers, addresses, links, api: Api::Check, failed, _rules: Some(scratch) })
}
