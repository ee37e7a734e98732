//! Three gubernator nodes, each with its counters in memory.
//!
//! The address that a node advertises is a proxy that delays, so every peer is as far away from every other as Tollgate's
//! are. Times and sizes of batches are gubernator's defaults. Its windows begin with the first request and not with the
//! clock; since the load begins with a window, both are the same but for milliseconds.

use super::connection::Connection;
use super::far_link::FarLink;
use super::nodes::{Api, Nodes};
use super::{LIMIT, NODES, WINDOW_MS};
use crate::process::{Server, free_port, tool};
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicU64;
use std::time::Duration;

/// Returns the path of the program, if it is there.
pub(super) fn program() -> Option<PathBuf> {
    tool("gubernator-node")
}

/// Starts three nodes that are each other's peers.
pub(super) fn start(program: &Path, behavior: &'static str, trip: Duration) -> Result<Nodes, String> {
    let ports: Vec<String> = (0..NODES).map(|_| free_port()).collect::<Result<_, _>>()?;
    let link = |port: &String| port.parse().map(|port| FarLink::to(port, trip));
    let links: Vec<FarLink> = ports.iter().map(link).collect::<Result<_, _>>().map_err(|_| "a port")?;
    let advertised: Vec<String> = links.iter().map(|link| link.address.to_string()).collect();
    let (mut servers, mut addresses) = (Vec::new(), Vec::new());
    for (port, own) in ports.iter().zip(&advertised) {
        let (grpc, http) = (format!("127.0.0.1:{port}"), format!("127.0.0.1:{}", free_port()?));
        let environment = [
            ("GUBER_GRPC_ADDRESS", grpc.as_str()),
            ("GUBER_HTTP_ADDRESS", &http),
            ("GUBER_ADVERTISE_ADDRESS", own),
            ("GUBER_PEER_DISCOVERY_TYPE", "none"),
            ("GUBER_LOG_LEVEL", "error"),
            ("BENCH_PEERS", &advertised.join(",")),
        ];
        servers.push(Server::start_anywhere_with(program, &environment, &http)?);
        addresses.push(http);
    }
    let (api, failed) = (Api::GetRateLimits(behavior), AtomicU64::new(0));
    let nodes = Nodes { servers, addresses, links, api, failed, _rules: None };
    nodes.wait_until(|nodes, node| {
        let health = nodes.connect(node).and_then(|mut connection| connection.get("/v1/HealthCheck"));
        let health = health.map_or_else(|_| String::new(), |(_, body)| body.replace(' ', ""));
        health.contains("\"status\":\"healthy\"") && health.contains(&format!("\"peer_count\":{NODES}"))
    })?;
    Ok(nodes)
}

/// Sends one hit.
pub(super) fn request(
    connection: &mut Connection,
    behavior: &str,
    key: &str,
) -> Result<(u16, String), String> {
    send(connection, behavior, key, 1, WINDOW_MS)
}

fn send(
    connection: &mut Connection,
    behavior: &str,
    key: &str,
    hits: u64,
    duration: u64,
) -> Result<(u16, String), String> {
    connection.post(
        "/v1/GetRateLimits",
        &format!(
            "{{\"requests\":[{{\"name\":\"bench\",\"unique_key\":\"{key}\",\"hits\":{hits},\"limit\":{LIMIT},\
             \"duration\":{duration},\"algorithm\":\"TOKEN_BUCKET\",\"behavior\":\"{behavior}\"}}]}}"
        ),
    )
}

/// Returns whether the response has an error in the place of a verdict.
pub(super) fn is_failed(body: &str) -> bool {
    body.replace(' ', "").split("\"error\":\"").nth(1).is_some_and(|error| !error.starts_with('"'))
}

/// Returns a key that another node owns: a response names the owner if it is not the node itself. The question leaves a
/// counter of a millisecond.
pub(super) fn key_of_another(
    connection: &mut Connection,
    behavior: &str,
    name: &str,
) -> Result<String, String> {
    for number in 0..1_000 {
        let key = format!("{name}-{number}");
        let (_, body) = send(connection, behavior, &key, 0, 1)?;
        if body.contains("\"owner\"") {
            return Ok(key);
        }
    }
    Err("gubernator: one node owns all keys".to_owned())
}
