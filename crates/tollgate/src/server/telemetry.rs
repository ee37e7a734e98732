//! Telemetry of the process, started from its settings: decision log, masking, node name.

use crate::cli::{ServeFlags, deprecated_variable, parse_size};
use crate::config::Config;
use anyhow::Context;
use serde::Deserialize;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tollgate_control::ControlPlane;
use tollgate_observe::{Mask, MaskStyle, MaskedAttributes, NodeInfo, Output, Telemetry, TelemetryConfig};

/// Maximum number of decisions in memory.
const MAX_RECORDS: usize = 1_000_000;

/// `decision_log` in the file of `--config`; what is left out is as in `docs/observe.md`.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct DecisionLog {
    /// A file, or `stdout`.
    output: Option<PathBuf>,
    /// How long a file may get before the next is begun.
    size: Option<String>,
    /// How many files there may be.
    files: Option<u32>,
    /// The fraction of allowed decisions that is logged.
    #[serde(alias = "allowed")]
    allowed_sample: Option<f64>,
    /// Decisions in memory.
    keep: Option<usize>,
    /// Attributes whose values are masked; `*` is all of them.
    #[serde(default, alias = "hide")]
    mask: Vec<String>,
    /// What masked values are replaced by.
    #[serde(default, alias = "hidden_as")]
    mask_style: MaskStyle,
}

impl DecisionLog {
    /// Resolves a relative path against `folder`, the folder of the configuration file.
    pub(crate) fn resolve(&mut self, folder: &Path) {
        if let Some(output) = self.output.as_mut().filter(|output| output.as_os_str() != "stdout") {
            *output = folder.join(&*output);
        }
    }
}

/// Merges flags over the file and validates the bounds.
pub(crate) fn decision_log(flags: &ServeFlags, file: DecisionLog) -> anyhow::Result<DecisionLog> {
    let former =
        || deprecated_variable("TOLLGATE_DECISION_LOG_ALLOWED", "TOLLGATE_DECISION_LOG_ALLOWED_SAMPLE");
    let allowed_sample = match flags.decision_log_allowed_sample {
        None => former()?.or(file.allowed_sample),
        flag => flag,
    };
    let log = DecisionLog { output: flags.decision_log.clone().or(file.output), allowed_sample, ..file };
    if let Some(fraction) = log.allowed_sample {
        anyhow::ensure!(
            (0.0..=1.0).contains(&fraction),
            "--decision-log-allowed-sample: must be between 0 and 1, got {fraction}"
        );
    }
    if let Some(keep) = log.keep {
        anyhow::ensure!(
            (1..=MAX_RECORDS).contains(&keep),
            "`decision_log.keep`: must be between 1 and {MAX_RECORDS}, got {keep}"
        );
    }
    if let Some(files) = log.files {
        anyhow::ensure!(
            (1..=1_000).contains(&files),
            "`decision_log.files`: must be between 1 and 1000, got {files}"
        );
    }
    log.bytes()?;
    Ok(log)
}

impl DecisionLog {
    fn bytes(&self) -> anyhow::Result<u64> {
        let size = self.size.as_deref().map(parse_size).transpose();
        let size = size.map_err(anyhow::Error::msg).context("`decision_log.size`")?;
        Ok(size.map_or(100 << 20, |size| size as u64))
    }

    /// Returns whether the decision log goes to standard output.
    pub(crate) fn is_stdout(&self) -> bool {
        self.output.as_ref().is_some_and(|path| path.as_os_str() == "stdout")
    }

    fn output(&self) -> anyhow::Result<Option<Output>> {
        let Some(path) = &self.output else { return Ok(None) };
        if self.is_stdout() {
            return Ok(Some(Output::Stdout));
        }
        Ok(Some(Output::File { path: path.clone(), bytes: self.bytes()?, files: self.files.unwrap_or(5) }))
    }

    fn mask(&self, control: Option<&Arc<ControlPlane>>) -> Mask {
        let mask = match control {
            // Gives the same key ids on all nodes, equal to those of quotas.
            Some(control) => {
                let book = Arc::clone(control);
                Mask::with_hash(move |text| book.key_id(text))
            }
            None => Mask::random(),
        };
        let masked = match &self.mask[..] {
            [] => MaskedAttributes::Secrets,
            names if names.iter().any(|name| name == "*") => MaskedAttributes::All,
            names => MaskedAttributes::Also(names.to_vec()),
        };
        mask.with_masked(masked, self.mask_style)
    }
}

/// Starts telemetry.
pub(crate) fn start(config: &Config, control: Option<&Arc<ControlPlane>>) -> anyhow::Result<Arc<Telemetry>> {
    let log = &config.decision_log;
    let defaults = TelemetryConfig::default();
    let node = node_name(config);
    let settings = TelemetryConfig {
        node: NodeInfo { node: node.into(), region: config.region.clone().map(Into::into) },
        allowed_sample: log.allowed_sample.unwrap_or(defaults.allowed_sample),
        max_records: log.keep.unwrap_or(defaults.max_records),
        output: log.output()?,
        mask: log.mask(control),
        service_name: config.otlp.as_ref().map(|otlp| otlp.service.clone()),
    };
    let flag = || format!("--decision-log {}", log.output.as_deref().unwrap_or("".as_ref()).display());
    let observe = Telemetry::new(settings).with_context(flag)?;
    observe.start()?;
    Ok(observe)
}

/// Returns the name of this node: as configured, or the host's.
pub(crate) fn node_name(config: &Config) -> String {
    config.node.clone().or_else(machine).unwrap_or_else(|| "tollgate".to_owned())
}

/// Returns the host name.
fn machine() -> Option<String> {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").ok()?;
    Some(name.trim().to_owned()).filter(|name| !name.is_empty())
}
