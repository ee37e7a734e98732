//! Pipeline: one connection to one shard, and the requests queued for it.
//!
//! Requests that arrive while a batch is in flight join the next one: no timer, no fixed batch size. A batch is one
//! pipeline of script calls; all requests of a batch whose keys live together are one call, which reads its bundles
//! once, decides the requests in order, and writes each bundle once. Requests wait on their own deadlines, never on the
//! connection: one that was canceled before the batch is sent is left out.
//!
//! A batch whose reply is lost is never sent again: its charges may have been applied. They fail, so units are at most
//! lost to the caller, never granted twice.

use super::data_loss::DataLoss;
use super::recompute::RecomputedOutcome;
use super::script::Scripts;
use super::script_call::{CallResult, ScriptCall};
use super::shard::RunIdTracker;
use super::shard_request::ShardRequest;
use crate::breaker::Breaker;
use redis::aio::MultiplexedConnection;
use smallvec::SmallVec;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use tokio::sync::{mpsc, oneshot};
use tokio::time::{Interval, MissedTickBehavior};
use tollgate_core::{Admission, Clock, TimeDelta, Timestamp};

/// The command that a server executes.
#[derive(Clone, Debug)]
pub(super) enum Command {
    Charge,
    Debit,
    Release,
    /// Undo what was taken at `taken_at`, given the bundles' prior contents.
    Undo {
        taken_at: Timestamp,
        priors: Vec<Vec<u8>>,
    },
    /// Return units taken ahead at `taken_at`; the last of the request's bundles marks that they were returned.
    ReturnUnits {
        taken_at: Timestamp,
        full_at: Timestamp,
    },
}

/// A request that waits for a reply.
pub(super) struct Job {
    pub(super) command: Command,
    pub(super) request: Box<ShardRequest>,
    pub(super) slot: u16,
    /// The slot is being migrated to this server: `ASKING` must be sent first.
    pub(super) is_asking: bool,
    pub(super) reply: oneshot::Sender<Result<ShardReply, FailedJob>>,
}

/// The reply of a server.
#[derive(Debug)]
pub(super) struct ShardReply {
    pub(super) now: Timestamp,
    pub(super) admission: Admission,
    pub(super) outcomes: SmallVec<[RecomputedOutcome; 4]>,
    /// Prior contents of the bundles, if the request is partial.
    pub(super) priors: Vec<Vec<u8>>,
    /// Data loss that was assumed.
    pub(super) loss: DataLoss,
}

/// Why there is no reply, and the request for a retry.
pub(super) struct FailedJob {
    pub(super) failure: Failure,
    pub(super) request: Box<ShardRequest>,
}

/// Why there is no reply.
#[derive(Clone, Debug)]
pub(super) enum Failure {
    /// The slot has moved to this address.
    Moved(String),
    /// The slot is being migrated to this address, and the key may be there.
    Ask(String),
    /// The server rejected the request before applying any of it.
    Rejected(String),
    /// The request was never sent.
    Unsent(String),
    /// This node's calendar windows were too far from this server time.
    ClockMismatch(Timestamp),
    /// Sent without a reply: it may have been applied.
    Lost(String),
}

/// Opens a connection of a pipeline. The address is for status and logs.
pub(super) type Connect = Arc<
    dyn Fn() -> Pin<Box<dyn Future<Output = redis::RedisResult<MultiplexedConnection>> + Send>> + Send + Sync,
>;

/// Everything a pipeline needs.
pub(super) struct Pipeline {
    pub(super) connect: Connect,
    pub(super) scripts: Arc<Scripts>,
    /// Clock whose time is passed to scripts; the server's own if absent.
    pub(super) manual_clock: Option<Arc<dyn Clock>>,
    pub(super) clock: Arc<dyn Clock>,
    pub(super) breaker: Arc<Breaker>,
    /// What this server may have lost, and the longest time that it matters.
    pub(super) run_id: Arc<RunIdTracker>,
    pub(super) loss_window: Option<TimeDelta>,
    /// Whether requests of different slots may share a call.
    pub(super) merges: bool,
    /// How long a reply may take before the connection is dropped.
    pub(super) timeout: Duration,
    pub(super) connect_timeout: Duration,
    /// Open connections to this server.
    pub(super) connected: Arc<AtomicUsize>,
    /// Decisions on which the script and `Limit::step` differ; not zero only through a bug.
    pub(super) mismatches: Arc<AtomicUsize>,
}

/// Interval between checks of an idle connection.
const IDLE_CHECK: Duration = Duration::from_secs(2);

/// Maximum number of requests in one batch.
const MAX_BATCH: usize = 128;

impl Pipeline {
    /// Serves jobs until all senders are dropped.
    pub(super) async fn run(self, mut jobs: mpsc::Receiver<Job>) {
        let mut connection: Option<MultiplexedConnection> = None;
        let mut batch = Vec::with_capacity(MAX_BATCH);
        let mut looks = tokio::time::interval(IDLE_CHECK);
        looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                biased;
                many = jobs.recv_many(&mut batch, MAX_BATCH) => {
                    if many == 0 {
                        break;
                    }
                }
                () = self.gone(&mut looks, &mut connection) => {
                    connection = None;
                    self.connected.fetch_sub(1, Ordering::Relaxed);
                    continue;
                }
            }
            batch.retain(|job: &Job| !job.reply.is_closed());
            if batch.is_empty() {
                continue;
            }
            if connection.is_none() {
                match self.open().await {
                    Ok(opened) => connection = Some(opened),
                    Err(why) => {
                        batch.drain(..).for_each(|job| job.fail(Failure::Unsent(why.clone())));
                        continue;
                    }
                }
                // Connecting took time: requests canceled meanwhile are not charged.
                batch.retain(|job| !job.reply.is_closed());
            }
            // Only after connecting, which may have shown that another process took over.
            self.doubt(&mut batch);
            if let Some(open) = &mut connection
                && !self.serve(open, ScriptCall::group(batch.drain(..), self.merges)).await
            {
                connection = None;
                self.connected.fetch_sub(1, Ordering::Relaxed);
            }
        }
        if connection.is_some() {
            self.connected.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Waits until an idle connection is broken, so that its status is correct without traffic.
    async fn gone(&self, looks: &mut Interval, connection: &mut Option<MultiplexedConnection>) {
        let Some(connection) = connection else { return std::future::pending().await };
        loop {
            looks.tick().await;
            // `TIME` is permitted even to users with few rights.
            let word = redis::cmd("TIME");
            let answer = tokio::time::timeout(self.timeout, word.query_async::<redis::Value>(connection));
            match answer.await {
                Ok(Err(error)) if error.is_unrecoverable_error() => return,
                Err(_) => return,
                // An error reply still shows that the server responds.
                Ok(_) => {}
            }
        }
    }

    /// Records in each job what its server may have lost. An undo uses what was assumed when the units were taken.
    fn doubt(&self, batch: &mut [Job]) {
        let lost_at = self.run_id.lost_at();
        let now = self.manual_clock.as_ref().map_or_else(|| self.clock.now(), Clock::now);
        for job in batch.iter_mut().filter(|job| !matches!(job.command, Command::Undo { .. })) {
            job.request.loss.record(lost_at, now, self.loss_window);
        }
    }

    async fn open(&self) -> Result<MultiplexedConnection, String> {
        match tokio::time::timeout(self.connect_timeout, (self.connect)()).await {
            Ok(Ok(connection)) => {
                self.connected.fetch_add(1, Ordering::Relaxed);
                // Connecting may take longer than any check waits; without an immediate probe the first check after an
                // outage would prolong it.
                self.breaker.allow_probe(self.clock.now());
                Ok(connection)
            }
            Ok(Err(error)) => Err(error.to_string()),
            Err(_) => Err("no connection in time".to_owned()),
        }
    }

    /// Sends calls and distributes their replies. Returns false if the connection is no longer usable.
    async fn serve(&self, connection: &mut MultiplexedConnection, mut calls: Vec<ScriptCall>) -> bool {
        let mut by_name = true;
        let mut usable = true;
        // A server without a cached script is sent its text, for those calls only.
        while !calls.is_empty() {
            let told = self.manual_clock.as_ref().map(Clock::now);
            let near = told.unwrap_or_else(|| self.clock.now());
            let mut pipeline = redis::Pipeline::with_capacity(calls.len());
            for call in &calls {
                call.write(&mut pipeline, &self.scripts, told, near, by_name);
            }
            let sent = pipeline.len();
            let answer =
                tokio::time::timeout(self.timeout, connection.send_packed_commands(&pipeline, 0, sent));
            let values = match answer.await {
                Ok(Ok(values)) if values.len() == sent => values,
                Ok(Ok(_)) => return lose(calls, "an answer of another length"),
                Ok(Err(error)) => return lose(calls, &error.to_string()),
                Err(_) => return lose(calls, "no answer in time"),
            };
            let (mut unknown, mut values) = (Vec::new(), values.into_iter());
            for call in calls {
                if call.is_asking() {
                    let _ = values.next();
                }
                match call.decode(values.next().unwrap_or(redis::Value::Nil), &self.mismatches) {
                    CallResult::Done => {}
                    CallResult::WrongServer => usable = false,
                    CallResult::UnknownScript(call) => unknown.push(call),
                }
            }
            calls = if by_name { unknown } else { Vec::new() };
            by_name = false;
        }
        usable
    }
}

fn lose(calls: Vec<ScriptCall>, why: &str) -> bool {
    for call in calls {
        call.fail(&Failure::Lost(why.to_owned()));
    }
    false
}

impl Job {
    pub(super) fn fail(self, why: Failure) {
        let _ = self.reply.send(Err(FailedJob { failure: why, request: self.request }));
    }
}
