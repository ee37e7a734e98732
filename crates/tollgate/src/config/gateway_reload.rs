//! Gateway configuration reload: routes, upstreams, listeners, limits on callers, `identity` and `responses` take
//! effect at once; changes that require a restart are logged. A file that cannot be used changes nothing.

use crate::cli::ServeFlags;
use crate::config::Config;
use crate::config::reload::{self, ReloadCause};
use crate::config::rule_sources::FileStamps;
use crate::server::status::{ReloadTarget, ServerStatus};
use crate::server::store::Store;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use tollgate_gateway::Handle;

/// Active gateway with the settings it was started with, and what a reload needs.
pub(crate) struct GatewayReload {
    pub(crate) flags: ServeFlags,
    pub(crate) path: PathBuf,
    /// Content of the file at the start.
    pub(crate) text: Option<Vec<u8>>,
    pub(crate) started: Config,
    /// True if protocol servers run beside the proxy.
    pub(crate) has_protocols: bool,
    pub(crate) gateway: Handle<Store>,
    pub(crate) status: Arc<ServerStatus>,
}

impl GatewayReload {
    /// Watches the file for as long as the future is polled.
    pub(crate) async fn watch(mut self) {
        let last = Mutex::new(self.text.take());
        let paths = vec![self.path.clone()];
        let act = move |why| {
            let text = std::fs::read(&self.path).ok();
            let mut last = last.lock().unwrap_or_else(PoisonError::into_inner);
            // Other files in the directory change as well, such as a log.
            if why == ReloadCause::Signal || *last != text {
                *last = text;
                self.reload();
            }
        };
        // Starts without stamps, so that a change since the file was read is found by the first poll.
        reload::watch_files(paths, None, FileStamps::default(), act).await;
    }

    fn reload(&self) {
        let changed = Config::new(&self.flags).and_then(|mut config| {
            config.identity.api_key.quota_keys = self.started.identity.api_key.quota_keys.clone();
            let section = config.gateway()?;
            self.gateway.reload(&section).map_err(anyhow::Error::msg)?;
            section.require_domains(&self.started.more_rule_options.required_domains);
            Ok(config)
        });
        match changed {
            Err(error) => {
                let error = format!("{}: {error:#}", self.path.display());
                tracing::error!("configuration reload failed; keeping previous settings: {error}");
                self.status.record_failure(ReloadTarget::Settings, error);
            }
            Ok(config) => {
                for ((name, before), (_, now)) in
                    self.started.restart_only().iter().zip(&config.restart_only())
                {
                    if before != now {
                        tracing::warn!(
                            "`{name}` changed in {}; it takes effect after a restart",
                            self.path.display()
                        );
                    }
                }
                // The proxy has applied these already; the protocol servers have not.
                let unapplied = [
                    ("identity", self.started.identity == config.identity),
                    ("responses", self.started.responses == config.responses),
                ];
                for (name, _) in unapplied.iter().filter(|(_, same)| !same && self.has_protocols) {
                    tracing::warn!(
                        "`{name}` changed in {}; for the protocol servers (`http`, `grpc`) it takes effect after a restart",
                        self.path.display()
                    );
                }
                tracing::info!("configuration reloaded from {}", self.path.display());
                self.status.record_success(ReloadTarget::Settings);
            }
        }
    }
}
