//! Three nodes that keep one limit, the links between them, and their metrics.

use super::NODES;
use super::connection::Connection;
use super::far_link::FarLink;
use crate::process::Server;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// The protocol of a node.
#[derive(Clone, Copy)]
pub(super) enum Api {
    /// `POST /v1/check` of Tollgate.
    Check,
    /// `POST /v1/GetRateLimits` of gubernator, with this behavior.
    GetRateLimits(&'static str),
}

pub(super) struct Nodes {
    pub(super) servers: Vec<Server>,
    /// HTTP addresses.
    pub(super) addresses: Vec<String>,
    pub(super) links: Vec<FarLink>,
    pub(super) api: Api,
    /// Requests that got no verdict.
    pub(super) failed: AtomicU64,
    /// Kept for as long as the nodes run.
    pub(super) _rules: Option<Scratch>,
}

/// A file that is deleted on drop.
pub(super) struct Scratch(pub(super) std::path::PathBuf);

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

impl Nodes {
    /// Opens a connection to a node.
    pub(super) fn connect(&self, node: usize) -> Result<Connection, String> {
        Connection::open(&self.addresses[node])
    }

    /// Returns whether a request of this key is admitted.
    pub(super) fn check(&self, connection: &mut Connection, key: &str) -> Result<bool, String> {
        match self.api {
            Api::Check => {
                let body = format!("{{\"domain\":\"d\",\"attributes\":{{\"k\":\"{key}\"}}}}");
                connection.post("/v1/check", &body).map(|(status, _)| status == 200)
            }
            Api::GetRateLimits(behavior) => {
                let (status, body) = super::gubernator::request(connection, behavior, key)?;
                let has_verdict = status == 200 && !super::gubernator::is_failed(&body);
                self.failed.fetch_add(u64::from(!has_verdict), Ordering::Relaxed);
                Ok(has_verdict && !body.contains("OVER_LIMIT"))
            }
        }
    }

    /// Returns the name of a counter that the last node does not own.
    pub(super) fn far_key(&self, name: &str) -> Result<String, String> {
        match self.api {
            // The rule names the first node as the owner.
            Api::Check => Ok(name.to_owned()),
            Api::GetRateLimits(behavior) => {
                super::gubernator::key_of_another(&mut self.connect(NODES - 1)?, behavior, name)
            }
        }
    }

    /// Returns the number of requests that got no verdict.
    pub(super) fn errors(&self) -> u64 {
        self.failed.load(Ordering::Relaxed)
    }

    /// Returns the values of a metric, of which `name` is the beginning of a line.
    pub(super) fn metric(&self, node: usize, name: &str) -> Vec<f64> {
        let page = self.connect(node).and_then(|mut connection| connection.get("/metrics"));
        let page = page.map_or_else(|_| String::new(), |(_, page)| page);
        let own = page.lines().filter(|line| line.starts_with(name));
        own.filter_map(|line| line.rsplit(' ').next()?.parse().ok()).collect()
    }

    /// Waits until every node is ready.
    pub(super) fn wait_until(&self, is_ready: impl Fn(&Self, usize) -> bool) -> Result<(), String> {
        for _ in 0..600 {
            if (0..self.servers.len()).all(|node| is_ready(self, node)) {
                return Ok(());
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        Err("the nodes do not find each other".to_owned())
    }

    /// Returns the longest lag between two nodes, if they tell it.
    pub(super) fn lag_ms(&self) -> Option<f64> {
        let all = (0..self.servers.len()).flat_map(|node| self.metric(node, "ratelimit_region_lag_seconds"));
        all.reduce(f64::max).map(|seconds| 1_000.0 * seconds)
    }
}
