//! `connections` in the file of `--config`: how many connections the listeners of `serve` may have, and how long a new
//! one may be silent. The gateway's are in its own section, with those of its clients' other limits.

use anyhow::ensure;
use serde::Deserialize;
use std::time::Duration;
use tollgate_http::server::connections::FIRST_REQUEST;

/// Maximum of each number of connections.
const MAX: usize = 1 << 24;
/// Maximum of `first_request_ms`.
const MAX_FIRST_REQUEST: u64 = 300_000;

/// The section as written.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ConnectionSection {
    http: Option<usize>,
    grpc: Option<usize>,
    resp: Option<u32>,
    first_request_ms: Option<u64>,
}

/// Limits of the listeners; the open file limit may be lower.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ConnectionLimits {
    pub(crate) http: usize,
    pub(crate) grpc: usize,
    pub(crate) resp: u32,
    /// Time that a new connection has for its first request.
    pub(crate) first_request: Duration,
}

impl ConnectionSection {
    pub(crate) fn limits(&self) -> anyhow::Result<ConnectionLimits> {
        let resp = self.resp.map(|most| most as usize);
        for (name, most) in [("http", self.http), ("grpc", self.grpc), ("resp", resp)] {
            ensure!(
                most.is_none_or(|most| (1..=MAX).contains(&most)),
                "`connections.{name}` in the file of --config: must be between 1 and {MAX}"
            );
        }
        let first_request = self.first_request_ms;
        ensure!(
            first_request.is_none_or(|time| (1..=MAX_FIRST_REQUEST).contains(&time)),
            "`connections.first_request_ms` in the file of --config: must be between 1 and {MAX_FIRST_REQUEST}"
        );
        Ok(ConnectionLimits {
            http: self.http.unwrap_or(65_536),
            grpc: self.grpc.unwrap_or(65_536),
            resp: self.resp.unwrap_or(131_072),
            first_request: first_request.map_or(FIRST_REQUEST, Duration::from_millis),
        })
    }
}
