//! `tollgate ratelimit`: a replacement of envoyproxy/ratelimit. Reads that service's environment, serves its ports and paths
//! with its bodies, and writes its log messages; the engine, the stores and the servers are those of `serve`.
//!
//! | module | contents |
//! |---|---|
//! | `variables` | every variable of that service, with its type, its default and what becomes of it |
//! | `go_values`, `environment` | their values, read as Go reads them |
//! | `settings`, `redis`, `xds` | typed settings from them: a [`Config`] as `serve` has it, and a [`Service`] |
//! | `service` | what `serve` has no setting for: pages, health, metric sinks |
//! | `health` | when that service counts as healthy |
//! | `mapper` | the file that renames metrics there, and has no effect here |
//! | `pages` | its debug pages and its Prometheus port |
//! | `metrics`, `series`, `weights` | its metrics by its names, bounded in number |
//! | `statsd` | the statsd sink, over TCP as it has it |
//!
//! Rejected: a translation into flags of `serve`, because half of these settings have none, and an error about a flag
//! that the operator did not write does not help.

mod environment;
mod go_values;
mod health;
mod mapper;
mod metrics;
mod pages;
mod redis;
mod series;
mod service;
mod settings;
mod statsd;
mod variables;
mod weights;
mod xds;

pub(crate) use environment::Notice;
pub(crate) use health::ServiceHealth;
pub(crate) use pages::{DebugPages, MetricsPage};
pub(crate) use service::Service;
pub(crate) use statsd::run as run_statsd;

use crate::config::Config;
use crate::server::{logging, serve};
use environment::{Environment, InvalidValue};
use std::process::ExitCode;
use tollgate_rules::Options;

/// Exit code for a value of the wrong type, as that service has it.
const WRONG_VALUE: u8 = 2;

/// Returns whether the process was started under that service's name.
pub(crate) fn is_called() -> bool {
    let name = std::env::args_os().next().map(std::path::PathBuf::from);
    name.as_deref().and_then(std::path::Path::file_name).is_some_and(|name| name == "ratelimit")
}

/// Runs until a shutdown signal.
pub(crate) fn run() -> anyhow::Result<ExitCode> {
    let variable = |name: &str| std::env::var_os(name).map(|value| value.to_string_lossy().into_owned());
    let mut flags = crate::cli::serve_flags();
    let environment = match Environment::read(variable) {
        Ok(environment) => environment,
        Err(error) => return wrong_value(&error),
    };
    settings::log(&environment, &mut flags)?;
    let logs = logging::start(&flags)?;
    for notice in environment.notices() {
        match notice {
            Notice::Info(text) => tracing::info!("{text}"),
            Notice::Warning(text) => tracing::warn!("{text}"),
        }
    }
    if let Some(text) = mapper::warning(&environment) {
        tracing::warn!("{text}");
    }
    let config: Config = match settings::config(&environment, flags) {
        Ok(config) => config,
        Err(error) => match error.downcast_ref::<InvalidValue>() {
            Some(wrong) => return wrong_value(wrong),
            None => return Err(error),
        },
    };
    serve::run_server(config, logs)
}

/// What the environment of such a process means.
#[derive(Debug)]
pub(crate) struct Examined {
    /// What a start would report.
    pub(crate) notices: Vec<Notice>,
    /// How it reads rule files, but for the profile.
    pub(crate) options: Options,
    /// Where its rules come from.
    pub(crate) rules: String,
}

/// Examines an environment without a start.
///
/// # Errors
/// Why the start would end.
pub(crate) fn examine(lookup: impl Fn(&str) -> Option<String>) -> anyhow::Result<Examined> {
    settings::examine(&Environment::read(lookup)?)
}

/// Says what is wrong, and ends with the code that the service has for it.
fn wrong_value(error: &InvalidValue) -> anyhow::Result<ExitCode> {
    logging::flush(Some(&anyhow::Error::new(error.clone())));
    Ok(ExitCode::from(WRONG_VALUE))
}

#[cfg(test)]
mod tests {
    use super::variables::{VARIABLES, find};

    /// Operators who migrate look a variable up there.
    #[test]
    fn the_guide_has_every_variable() {
        let guide = include_str!("../../../../docs/deployment/envoyproxy-ratelimit.md");
        for variable in VARIABLES {
            assert!(guide.contains(&format!("`{}`", variable.name)), "{}", variable.name);
        }
        let rows =
            guide.lines().skip_while(|line| *line != "## Variables").filter(|line| line.starts_with("| `"));
        for row in rows {
            let cells: Vec<&str> = row.split('|').map(str::trim).collect();
            let names = cells[1].split_whitespace().map(|name| name.trim_matches('`'));
            let variables: Vec<_> =
                names.map(|name| find(name).unwrap_or_else(|| panic!("{name}"))).collect();
            for default in cells[2].split(',').map(str::trim).filter(|default| !default.is_empty()) {
                assert!(variables.iter().any(|variable| variable.default == default), "{default} in {row}");
            }
        }
    }
}
