//! A real redis-server on one core, and its statistics.

use crate::process::{Server, free_port};
use redis::{Cmd, Connection, FromRedisValue};
use std::path::Path;

/// An empty server without persistence.
pub(crate) struct Redis {
    server: Server,
    pub(crate) port: String,
    scheme: &'static str,
}

impl Redis {
    pub(crate) fn start(core: &str) -> Result<Self, String> {
        Self::launch(core, "redis", &[])
    }

    /// Starts a cluster of one: as in any cluster, requests of different slots cannot share a script call.
    pub(crate) fn start_cluster(core: &str) -> Result<Self, String> {
        let port = free_port()?;
        let file = format!("tollgate-bench-{}-{port}.conf", std::process::id());
        let redis = Self::launch(
            core,
            "redis+cluster",
            &["--cluster-enabled", "yes", "--cluster-config-file", &file, "--cluster-port", &port],
        )?;
        redis.query::<()>(redis::cmd("CLUSTER").arg("ADDSLOTSRANGE").arg(0).arg(16_383))?;
        for _ in 0..1_000 {
            if redis.query::<String>(redis::cmd("CLUSTER").arg("INFO"))?.contains("cluster_state:ok") {
                return Ok(redis);
            }
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        Err("the cluster did not become ready".to_owned())
    }

    fn launch(core: &str, scheme: &'static str, extra: &[&str]) -> Result<Self, String> {
        let port = free_port()?;
        let folder = std::env::temp_dir().display().to_string();
        let mut flags = vec!["--port", &port, "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"];
        flags.extend(["--dir", &folder]);
        flags.extend(extra);
        let address = format!("127.0.0.1:{port}");
        let server = Server::start_with(core, Path::new("redis-server"), &flags, &[], &address)?;
        Ok(Self { server, port, scheme })
    }

    pub(crate) fn address(&self) -> &str {
        &self.server.address
    }

    /// Returns the URL for `--store`.
    pub(crate) fn url(&self) -> String {
        format!("{}://{}", self.scheme, self.server.address)
    }

    fn connection(&self) -> Result<Connection, String> {
        let client = redis::Client::open(format!("redis://{}", self.server.address));
        client.and_then(|client| client.get_connection()).map_err(|error| error.to_string())
    }

    /// Sends a command besides the traffic.
    pub(crate) fn query<T: FromRedisValue>(&self, command: &Cmd) -> Result<T, String> {
        command.query(&mut self.connection()?).map_err(|error| error.to_string())
    }

    /// Returns a number from `INFO section`.
    fn info(&self, section: &str, field: &str) -> Result<f64, String> {
        let text: String = self.query(redis::cmd("INFO").arg(section))?;
        let value = text.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'));
        let number = value.and_then(|value| value.trim().parse().ok());
        number.ok_or_else(|| format!("INFO {section} has no {field}"))
    }

    /// Returns its CPU time in microseconds.
    pub(crate) fn cpu_micros(&self) -> Result<f64, String> {
        let text: String = self.query(redis::cmd("INFO").arg("cpu"))?;
        let seconds = text.lines().filter_map(|line| {
            let (name, value) = line.split_once(':')?;
            matches!(name, "used_cpu_sys" | "used_cpu_user").then(|| value.trim().parse::<f64>().ok())?
        });
        Ok(seconds.sum::<f64>() * 1e6)
    }

    /// Returns how often it has read from a connection.
    pub(crate) fn reads(&self) -> Result<f64, String> {
        self.info("stats", "total_reads_processed")
    }

    pub(crate) fn used_memory(&self) -> Result<f64, String> {
        self.info("memory", "used_memory")
    }

    /// Returns the script calls since the last `CONFIG RESETSTAT`.
    pub(crate) fn script_calls(&self) -> Result<f64, String> {
        let text: String = self.query(redis::cmd("INFO").arg("commandstats"))?;
        let calls = |line: &str| {
            let rest = line.strip_prefix("cmdstat_eval").map(|rest| rest.trim_start_matches("sha"))?;
            rest.strip_prefix(":calls=")?.split(',').next()?.parse::<f64>().ok()
        };
        Ok(text.lines().filter_map(calls).sum())
    }
}
