//! Redis store: counters in Redis, in a primary behind Sentinel, or in Redis Cluster, shared by any number of nodes.
//!
//! | module | contents |
//! |---|---|
//! | `config` | addresses, credentials, timeouts |
//! | `key_encoding` | keys of bundles, names of counters, cluster slots |
//! | `shard_request` | a request's charges, by the shard or slot where they live |
//! | `lua/`, `script` | the scripts that decide and write |
//! | `script_args`, `script_call` | requests as the argument of one script call, and its reply |
//! | `decode_state`, `recompute` | the states in the bundles, and the outcomes recomputed by `Limit::step` |
//! | `data_loss` | the state assumed for counters that a server may have lost |
//! | `pipeline` | one connection: batches without a timer |
//! | `probe` | whether the servers can be reached at startup |
//! | `shard`, `topology` | servers with their breakers, and which has which slot |
//! | `dispatch` | one shard request: retries within the deadline |
//!
//! `docs/redis.md` has every byte, the behavior on each failure, and measurements. A library's own cluster client was
//! rejected: it retries calls that may have been applied, and waits where a check must not.

mod config;
mod data_loss;
mod decode_state;
mod dispatch;
mod key_encoding;
mod pipeline;
mod probe;
mod recompute;
mod script;
mod script_args;
mod script_call;
mod shard;
mod shard_request;
mod topology;

pub use config::{RedisConfig, RedisConfigError};
pub use shard::ShardStatus;

use config::Kind;
use dispatch::DispatchError;
use pipeline::{Command, ShardReply};
use script::Scripts;
use shard::Shared;
use shard_request::{KeyLayout, ShardRequest};
use smallvec::SmallVec;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use tokio::time::Instant;
use tollgate_core::{
    Admission, Charge, Clock, CounterStore, Enforcement, Outcome, Outcomes, Permit, StoreError, SystemClock,
    Timestamp, UnitReturn,
};
use topology::Topology;

/// Counters in Redis. Cheap to clone: clones share everything.
#[derive(Clone)]
pub struct RedisStore {
    shared: Arc<Shared>,
    topology: Arc<Topology>,
}

impl RedisStore {
    /// Creates a store over these servers. Nothing is connected yet: a node starts without Redis, and recovers once it
    /// is available. Must be called within a tokio runtime.
    #[must_use]
    pub fn connect(config: RedisConfig) -> Self {
        Self::start(config, None, Arc::new(SystemClock::new()))
    }

    /// Creates a store with this clock as the node's own: breakers use it. Counters use the server's clock, however far
    /// off it is.
    #[must_use]
    pub fn with_own_clock(config: RedisConfig, own: Arc<dyn Clock>) -> Self {
        Self::start(config, None, own)
    }

    /// Creates a store whose counters use this clock instead of the server's: for tests and simulations.
    #[must_use]
    pub fn with_clock(config: RedisConfig, clock: Arc<dyn Clock>) -> Self {
        Self::start(config, Some(clock), Arc::new(SystemClock::new()))
    }

    fn start(config: RedisConfig, told: Option<Arc<dyn Clock>>, clock: Arc<dyn Clock>) -> Self {
        let shared = Arc::new(Shared {
            config,
            scripts: Arc::new(Scripts::new()),
            manual_clock: told,
            clock,
            mismatches: Arc::default(),
        });
        Self { topology: Topology::start(Arc::clone(&shared)), shared }
    }

    /// Returns the status of each server.
    #[must_use]
    pub fn status(&self) -> Vec<ShardStatus> {
        self.topology.status()
    }

    /// Returns the number of decisions on which a script and `Limit::step` differed. Not zero only through a bug.
    #[must_use]
    pub fn mismatches(&self) -> usize {
        let counted: &AtomicUsize = &self.shared.mismatches;
        counted.load(Ordering::Relaxed)
    }

    /// Charges one request, and waits at most `left` or the configured deadline, whichever is less.
    ///
    /// # Errors
    /// As [`CounterStore::charge`].
    pub async fn charge_with_deadline(
        &self,
        charges: &[Charge<'_>],
        left: Duration,
    ) -> Result<Outcomes, StoreError> {
        let mut parts = shard_request::from_charges(charges, self.key_layout(), &self.shared.config.hashing);
        let until = self.deadline(left);
        match parts.len() {
            0 => Ok(Outcomes {
                admission: Admission::Admitted,
                at: self.shared.manual_clock.as_ref().unwrap_or(&self.shared.clock).now(),
                per_charge: SmallVec::new(),
            }),
            1 => {
                let (slot, request) = parts.remove(0);
                let layout = order(&request);
                let answer =
                    self.send(Command::Charge, slot, request, until).await.map_err(|error| error.error)?;
                Ok(outcomes(answer.admission, [(layout.as_slice(), &answer)].into_iter()))
            }
            _ => self.charge_slots(parts, until).await,
        }
    }

    /// Charges in several slots concurrently, and undoes the charges if the request is denied.
    async fn charge_slots(
        &self,
        parts: SmallVec<[(u16, ShardRequest); 1]>,
        until: Instant,
    ) -> Result<Outcomes, StoreError> {
        let mut asked = Vec::new();
        for (slot, request) in parts {
            let (store, kept) = (self.clone(), request.clone());
            let task = tokio::spawn(async move { store.send(Command::Charge, slot, request, until).await });
            asked.push((slot, kept, task));
        }
        let (mut answers, mut failed, mut why) = (Vec::new(), Vec::new(), None);
        for (slot, request, task) in asked {
            match task.await {
                Ok(Ok(answer)) => answers.push((slot, request, answer)),
                Ok(Err(asked)) => {
                    failed.extend(request.charges.iter().map(|want| want.index));
                    why = Some(asked.error);
                }
                Err(_) => {
                    failed.extend(request.charges.iter().map(|want| want.index));
                    why = Some(StoreError::Unavailable("a lane has ended".to_owned()));
                }
            }
        }
        let each = answers.iter().flat_map(|(_, request, answer)| {
            request
                .charges
                .iter()
                .map(|want| want.enforcement)
                .zip(answer.outcomes.iter().map(|told| &told.outcome))
        });
        let admission = Outcomes::admission(each);
        if admission == Admission::Denied || why.is_some() {
            self.undo_charges(&answers, until).await;
        }
        if let Some(why) = why {
            failed.sort_unstable();
            let alone = answers.is_empty();
            return Err(if alone { why } else { StoreError::Partial { failed, cause: Box::new(why) } });
        }
        let layouts: Vec<(ChargeOrder, &ShardReply)> =
            answers.iter().map(|(_, request, answer)| (order(request), answer)).collect();
        Ok(outcomes(admission, layouts.iter().map(|(layout, answer)| (layout.as_slice(), *answer))))
    }

    /// Undoes the charges of slots that admitted a denied request. It continues in the background if the caller cannot
    /// wait; until then the counters have fewer units, never more.
    async fn undo_charges(&self, answers: &[(u16, ShardRequest, ShardReply)], until: Instant) {
        let mut tasks = Vec::new();
        for (slot, request, answer) in answers {
            let takes = request.charges.iter().any(|want| want.enforcement != Enforcement::Independent);
            if answer.admission == Admission::Admitted && takes {
                let work = Command::Undo { taken_at: answer.now, priors: answer.priors.clone() };
                let (store, slot) = (self.clone(), *slot);
                let request = ShardRequest { loss: answer.loss, ..request.clone() };
                let patient = Instant::now() + 10 * self.shared.config.deadline;
                tasks.push(tokio::spawn(async move { store.send(work, slot, request, patient).await }));
            }
        }
        for task in tasks {
            if let Ok(Ok(Err(asked))) = tokio::time::timeout_at(until, task).await {
                tracing::warn!(error = %asked.error, "refund of a denied request's charge failed");
            }
        }
    }

    /// Sends debits and releases, each slot on its own.
    async fn send_each(
        &self,
        work: Command,
        parts: SmallVec<[(u16, ShardRequest); 1]>,
        until: Instant,
    ) -> Result<(), StoreError> {
        for (slot, request) in parts {
            self.send(work.clone(), slot, request, until).await.map_err(|asked| asked.error)?;
        }
        Ok(())
    }

    async fn send(
        &self,
        work: Command,
        slot: u16,
        request: ShardRequest,
        until: Instant,
    ) -> Result<ShardReply, DispatchError> {
        dispatch::send_with_retry(&self.shared, &self.topology, work, slot, request, until).await
    }

    fn key_layout(&self) -> KeyLayout {
        if self.shared.config.kind == Kind::Cluster { KeyLayout::Slots } else { KeyLayout::Single }
    }

    fn deadline(&self, left: Duration) -> Instant {
        Instant::now() + left.min(self.shared.config.deadline)
    }
}

/// Index and enforcement of each charge in the original request.
type ChargeOrder = SmallVec<[(usize, Enforcement); 4]>;

fn order(request: &ShardRequest) -> ChargeOrder {
    request.charges.iter().map(|want| (want.index, want.enforcement)).collect()
}

fn outcomes<'a>(
    admission: Admission,
    answers: impl Iterator<Item = (&'a [(usize, Enforcement)], &'a ShardReply)>,
) -> Outcomes {
    let mut at = Timestamp::MAX;
    let mut each: SmallVec<[(usize, Outcome); 4]> = answers
        .inspect(|(_, answer)| at = at.min(answer.now))
        .flat_map(|(layout, answer)| {
            layout
                .iter()
                .zip(&answer.outcomes)
                .map(move |((index, enforcement), told)| (*index, told.resolve(admission, *enforcement)))
        })
        .collect();
    each.sort_by_key(|(index, _)| *index);
    Outcomes { admission, at, per_charge: each.into_iter().map(|(_, outcome)| outcome).collect() }
}

impl CounterStore for RedisStore {
    async fn charge(&self, charges: &[Charge<'_>]) -> Result<Outcomes, StoreError> {
        self.charge_with_deadline(charges, Duration::MAX).await
    }

    async fn debit(&self, charges: &[Charge<'_>]) -> Result<(), StoreError> {
        let parts = shard_request::from_charges(charges, self.key_layout(), &self.shared.config.hashing);
        self.send_each(Command::Debit, parts, self.deadline(Duration::MAX)).await
    }

    async fn release(&self, permits: &[Permit<'_>]) -> Result<(), StoreError> {
        let parts = shard_request::from_permits(permits, self.key_layout(), &self.shared.config.hashing);
        self.send_each(Command::Release, parts, self.deadline(Duration::MAX)).await
    }

    async fn return_units(&self, back: &UnitReturn<'_>) -> Result<(), StoreError> {
        let parts = shard_request::from_unit_return(back, self.key_layout(), &self.shared.config.hashing);
        self.send_each(
            Command::ReturnUnits { taken_at: back.taken_at, full_at: back.full_at },
            parts,
            self.deadline(Duration::MAX),
        )
        .await
    }
}
