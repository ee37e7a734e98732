//! A real redis-server on one core, and what it tells about itself.

use crate::process::{Server, free_port};
use redis::{Cmd, Connection, FromRedisValue};
use std::path::Path;

/// A server of its own, empty, that keeps nothing on disk.
pub(crate) struct Redis {
    server: Server,
    pub(crate) port: String,
    scheme: &'static str,
}

impl Redis {
    pub(crate) fn start(core: &str) -> Result<Self, String> {
        Self::launch(core, "redis", &[])
    }

    /// A cluster of one: requests of different slots cannot share a script call, as in any cluster.
    pub(crate) fn start_cluster(core: &str) -> Result<Self, String> {
        let port = free_port()?;
        let file = format!("tollgate-bench-{}-{port}.conf", std::process::id());
        let redis = Self::launch(
            core,
            "redis+cluster",
            &["--cluster-enabled", "yes", "--cluster-config-file", &file, "--cluster-port", &port],
        )?;
        redis.ask::<()>(redis::cmd("CLUSTER").arg("ADDSLOTSRANGE").arg(0).arg(16_383))?;
        for _ in 0..1_000 {
            if redis.ask::<String>(redis::cmd("CLUSTER").arg("INFO"))?.contains("cluster_state:ok") {
                return Ok(redis);
            }
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        Err("the cluster does not get ready".to_owned())
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

    /// As `--store` takes it.
    pub(crate) fn url(&self) -> String {
        format!("{}://{}", self.scheme, self.server.address)
    }

    fn connection(&self) -> Result<Connection, String> {
        let client = redis::Client::open(format!("redis://{}", self.server.address));
        client.and_then(|client| client.get_connection()).map_err(|error| error.to_string())
    }

    /// Asks it something beside the traffic.
    pub(crate) fn ask<T: FromRedisValue>(&self, command: &Cmd) -> Result<T, String> {
        command.query(&mut self.connection()?).map_err(|error| error.to_string())
    }

    /// A number out of `INFO section`.
    fn info(&self, section: &str, field: &str) -> Result<f64, String> {
        let text: String = self.ask(redis::cmd("INFO").arg(section))?;
        let value = text.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'));
        let number = value.and_then(|value| value.trim().parse().ok());
        number.ok_or_else(|| format!("INFO {section} has no {field}"))
    }

    /// The processor time that it has used, in microseconds.
    pub(crate) fn cpu_micros(&self) -> Result<f64, String> {
        let text: String = self.ask(redis::cmd("INFO").arg("cpu"))?;
        let seconds = text.lines().filter_map(|line| {
            let (name, value) = line.split_once(':')?;
            matches!(name, "used_cpu_sys" | "used_cpu_user").then(|| value.trim().parse::<f64>().ok())?
        });
        Ok(seconds.sum::<f64>() * 1e6)
    }

    /// How often it has read from a connection.
    pub(crate) fn reads(&self) -> Result<f64, String> {
        self.info("stats", "total_reads_processed")
    }

    pub(crate) fn used_memory(&self) -> Result<f64, String> {
        self.info("memory", "used_memory")
    }

    /// Script calls since the last `CONFIG RESETSTAT`.
    pub(crate) fn script_calls(&self) -> Result<f64, String> {
        let text: String = self.ask(redis::cmd("INFO").arg("commandstats"))?;
        let calls = |line: &str| {
            let rest = line.strip_prefix("cmdstat_eval").map(|rest| rest.trim_start_matches("sha"))?;
            rest.strip_prefix(":calls=")?.split(',').next()?.parse::<f64>().ok()
        };
        Ok(text.lines().filter_map(calls).sum())
    }
}
