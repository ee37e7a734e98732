//! What `tollgate serve` and `tollgate gateway` run alike: the protocol servers, the admin server and the background tasks,
//! from the start to the end of the drain.

use crate::config::Config;
use crate::config::reload;
use crate::server::admin::RunningAdmin;
use crate::server::build::Assembly;
use crate::server::durable::DurableTasks;
use crate::server::limiter_tasks::LimiterTasks;
use crate::server::logging::LogControl;
use crate::server::nodes::Heartbeats;
use crate::server::otlp::ExportTask;
use crate::server::protocols::RunningServers;
use crate::server::signals::SignalTasks;
use crate::server::status::ServerStatus;
use std::sync::Arc;
use tokio::sync::watch;
use tokio::task::JoinHandle;

/// Everything that runs.
pub(crate) struct Running {
    status: Arc<ServerStatus>,
    stop: watch::Sender<bool>,
    protocols: RunningServers,
    operators: RunningAdmin,
    /// Tasks that end with the drain.
    watching: Vec<JoinHandle<()>>,
    tasks: LimiterTasks,
    durable: Option<DurableTasks>,
    export: Option<ExportTask>,
}

impl Running {
    /// Starts what has been built.
    pub(crate) fn start(config: &Config, built: Assembly, logs: Arc<LogControl>) -> anyhow::Result<Self> {
        let Assembly { limiter, rule_files, status, protocols, admin, export, cells, durable } = built;
        let (stop, stopping) = watch::channel(false);
        let drain = || drained(stopping.clone());
        let (verifier, quota_stats) = (protocols.verifier(), protocols.quota_stats());
        status.add_metrics(move |page| quota_stats.metrics(page));
        let counting = verifier.clone();
        status.add_metrics(move |page| {
            if let Some(unknown) = counting.as_ref().and_then(|verifier| verifier.unknown_keys()) {
                let help = "Number of requests described to the HTTP API with an API key that is not known.";
                page.counter("ratelimit_unknown_keys_total", help, unknown);
            }
        });
        let heartbeats = Heartbeats::new(&limiter, config, admin.control.clone());
        let signals = SignalTasks::start(&limiter, config, admin.control.clone(), &status)?;
        let operators = admin.start(
            (Arc::clone(&limiter), verifier.clone()),
            &status,
            logs,
            Arc::clone(&rule_files),
            drain(),
        )?;
        let protocols = protocols.start(config, &limiter, &status, drain);
        let watching = vec![
            tokio::spawn(reload::watch(rule_files)),
            tokio::spawn(reload::watch_keys(move || verifier.clone(), Arc::clone(&status))),
        ];
        let tasks = LimiterTasks::start(limiter, heartbeats, cells, signals);
        Ok(Self { status, stop, protocols, operators, watching, tasks, durable, export })
    }

    /// Runs a task until the drain has ended.
    pub(crate) fn spawn(&mut self, task: impl Future<Output = ()> + Send + 'static) {
        self.watching.push(tokio::spawn(task));
    }

    /// Returns a future that completes when the drain begins.
    pub(crate) fn drain(&self) -> impl Future<Output = ()> + Send + 'static {
        drained(self.stop.subscribe())
    }

    /// Begins the drain: requests in flight are finished.
    pub(crate) fn begin_drain(&self) {
        tracing::info!("draining; requests in flight are finished");
        self.status.drain();
        self.stop.send_replace(true);
    }

    /// Waits for the requests in flight, then ends all tasks. Each server bounds its own drain.
    pub(crate) async fn shutdown(self) {
        match self.protocols.shutdown().await {
            Ok(()) => tracing::info!("drained"),
            Err(error) => tracing::warn!("{error:#}"),
        }
        self.operators.shutdown().await;
        self.watching.iter().for_each(JoinHandle::abort);
        self.tasks.shutdown().await;
        if let Some(durable) = self.durable {
            durable.shutdown().await;
        }
        self.status.shutdown().await;
        if let Some(export) = self.export {
            export.shutdown().await;
        }
    }
}

async fn drained(mut stopping: watch::Receiver<bool>) {
    let _ = stopping.wait_for(|stop| *stop).await;
}
