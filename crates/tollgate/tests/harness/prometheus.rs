//! A real Prometheus, with the alerts that are deployed.

use super::Folder;
use serde_json::{Value, json};
use std::net::SocketAddr;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use tollgate_testing::ports::free_address;
use tollgate_testing::web::{exchange, request};

pub(crate) struct Prometheus {
    child: Child,
    pub(crate) address: SocketAddr,
}

impl Drop for Prometheus {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Prometheus {
    /// Scrapes these targets every second.
    pub(crate) fn start(folder: &Folder, targets: &[SocketAddr]) -> Self {
        let free = free_address();
        let alerts = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/prometheus/alerts.yml");
        let config = json!({
            "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
            "rule_files": [alerts],
            "scrape_configs": [{"job_name": "tollgate", "static_configs": [{"targets": targets}]}],
        });
        let config = folder.write("prometheus.yml", config.to_string());
        let child = Command::new("prometheus")
            .arg(format!("--config.file={}", config.display()))
            .arg(format!("--storage.tsdb.path={}", config.with_file_name("tsdb").display()))
            .arg(format!("--web.listen-address={free}"))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("Prometheus: run `make setup`");
        Self { child, address: free }
    }

    /// What it answers; nothing while it has no series to answer with.
    pub(crate) fn ask(&self, query: &str) -> Option<Vec<Value>> {
        let encoded: String = query.bytes().map(|byte| format!("%{byte:02X}")).collect();
        let answer =
            exchange(self.address, &request("GET", &format!("/api/v1/query?query={encoded}"), b"")).ok()?;
        if answer.status == 503 {
            return None;
        }
        let answer = answer.json();
        assert_eq!(answer["status"], "success", "{query}: {answer}");
        answer["data"]["result"].as_array().filter(|series| !series.is_empty()).cloned()
    }
}
