//! Background tasks of signals: a Prometheus is asked for some, and what nodes report is shared. No request waits for either.

mod answer;
mod prometheus;
mod shared_values;
mod sharing;

pub(crate) use prometheus::{Prometheus, read};

use crate::config::Config;
use crate::server::status::ServerStatus;
use crate::server::store::Store;
use prometheus::Queries;
use sharing::Sharing;
use std::sync::Arc;
use tokio::task::JoinHandle;
use tollgate_control::ControlPlane;
use tollgate_core::RecordStore;
use tollgate_engine::Limiter;

/// The running tasks.
pub(crate) struct SignalTasks(Vec<JoinHandle<()>>);

impl SignalTasks {
    /// Starts the tasks: queries if a Prometheus is configured, sharing if nodes share a store or a database.
    pub(crate) fn start(
        limiter: &Arc<Limiter<Store>>,
        config: &Config,
        control: Option<Arc<ControlPlane>>,
        status: &ServerStatus,
    ) -> anyhow::Result<Self> {
        let mut tasks = Vec::new();
        if let Some(prometheus) = &config.prometheus {
            let queries = Queries::new(Arc::clone(limiter), prometheus)?;
            let stats = queries.stats();
            status.add_metrics(move |page| stats.metrics(page));
            tasks.push(tokio::spawn(queries.run()));
        }
        let records = limiter.shared_records().or(control.map(|control| control as Arc<dyn RecordStore>));
        if let Some(records) = records {
            tasks.push(tokio::spawn(Sharing::new(Arc::clone(limiter), records).run()));
        }
        Ok(Self(tasks))
    }

    pub(crate) fn shutdown(&self) {
        self.0.iter().for_each(JoinHandle::abort);
    }
}
