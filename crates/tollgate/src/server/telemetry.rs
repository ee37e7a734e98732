//! Who watches decisions in this process, by its settings.

use crate::cli::{ServeFlags, parse_size};
use crate::config::Config;
use anyhow::Context;
use serde::Deserialize;
use std::path::PathBuf;
use std::sync::Arc;
use tollgate_control::ControlPlane;
use tollgate_observe::{Mask, MaskStyle, MaskedAttributes, NodeInfo, Output, Telemetry, TelemetryConfig};

/// Decisions in memory, at the most.
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
    /// The part of allowed decisions that is logged.
    allowed: Option<f64>,
    /// Decisions in memory.
    keep: Option<usize>,
    /// Attributes whose values are not told; `*` is all of them.
    #[serde(default)]
    hide: Vec<String>,
    /// What stands for values that are not told.
    #[serde(default)]
    hidden_as: MaskStyle,
}

/// Flags over the file, held to bounds.
pub(crate) fn decision_log(flags: &ServeFlags, file: DecisionLog) -> anyhow::Result<DecisionLog> {
    let log = DecisionLog {
        output: flags.decision_log.clone().or(file.output),
        allowed: flags.decision_log_allowed.or(file.allowed),
        ..file
    };
    if let Some(part) = log.allowed {
        anyhow::ensure!(
            (0.0..=1.0).contains(&part),
            "--decision-log-allowed: write a part from 0 to 1, not {part}"
        );
    }
    if let Some(keep) = log.keep {
        anyhow::ensure!(
            (1..=MAX_RECORDS).contains(&keep),
            "`decision_log.keep`: write a number from 1 to {MAX_RECORDS}, not {keep}"
        );
    }
    if let Some(files) = log.files {
        anyhow::ensure!(
            (1..=1_000).contains(&files),
            "`decision_log.files`: write a number from 1 to 1000, not {files}"
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

    /// Whether it is written to the standard output.
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
            // The same ids on all nodes, and those that quotas go by.
            Some(control) => {
                let book = Arc::clone(control);
                Mask::with_hash(move |text| book.key_id(text))
            }
            None => Mask::random(),
        };
        let hide = match &self.hide[..] {
            [] => MaskedAttributes::Secrets,
            names if names.iter().any(|name| name == "*") => MaskedAttributes::All,
            names => MaskedAttributes::Also(names.to_vec()),
        };
        mask.with_masked(hide, self.hidden_as)
    }
}

/// Starts watching.
pub(crate) fn start(config: &Config, control: Option<&Arc<ControlPlane>>) -> anyhow::Result<Arc<Telemetry>> {
    let log = &config.decision_log;
    let defaults = TelemetryConfig::default();
    let node = config.node.clone().or_else(machine).unwrap_or_else(|| "tollgate".to_owned());
    let settings = TelemetryConfig {
        node: NodeInfo { node: node.into(), region: config.region.clone().map(Into::into) },
        allowed_sample: log.allowed.unwrap_or(defaults.allowed_sample),
        max_records: log.keep.unwrap_or(defaults.max_records),
        output: log.output()?,
        mask: log.mask(control),
        service_name: config.otlp.as_ref().map(|otlp| otlp.service.clone()),
    };
    let told = || format!("--decision-log {}", log.output.as_deref().unwrap_or("".as_ref()).display());
    let observe = Telemetry::new(settings).with_context(told)?;
    observe.start()?;
    Ok(observe)
}

/// The machine's name.
fn machine() -> Option<String> {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").ok()?;
    Some(name.trim().to_owned()).filter(|name| !name.is_empty())
}
