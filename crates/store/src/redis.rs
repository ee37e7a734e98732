//! Redis store: counters in Redis, in a primary behind Sentinel, or in Redis Cluster, shared by any number of nodes.
//!
//! | module | contents |
//! |---|---|
//! | `config`, `tls` | addresses, credentials, timeouts; certificates |
//! | `key_encoding` | keys of bundles, names of counters, cluster slots |
//! | `envoy_keys` | counters as envoyproxy/ratelimit keeps them, if both share them |
//! | `shard_request` | a request's charges, by the shard or slot where they live |
//! | `lua/`, `script` | the scripts that decide and write |
//! | `script_args`, `bucket_args`, `script_call` | requests as the argument of one script call, and its reply |
//! | `decode_state`, `compact`, `recompute` | the states in the bundles, also in their short form, and the outcomes recomputed by `Limit::step` |
//! | `data_loss` | the state assumed for counters that a server may have lost |
//! | `pipeline` | one connection: batches that overlap where the link is long |
//! | `probe` | whether a server can be used: at startup, and while its breaker is open |
//! | `server_error` | why a server refuses to work, and what to do |
//! | `health` | one server's breaker and errors |
//! | `shard`, `topology` | servers, and which has which slot |
//! | `dispatch` | one shard request: retries within the deadline |
//! | `many_debits` | debits of thousands of counters, in pieces |
//! | `named` | stores by name beside the default one: each has its own servers, breakers and clock |
//! | `records` | records that nodes share: reservations |
//! | `late_replies` | replies after the deadline: kept or undone |
//! | `last_replies` | the last outcome of each counter |
//! | `damaged_keys` | keys that hold something else, reported once |
//!
//! `docs/redis.md` has every byte, the behavior on each failure, and measurements. A library's own cluster client was
//! rejected: it retries calls that may have been applied, and waits where a check must not.

mod bucket_args;
mod compact;
mod config;
mod damaged_keys;
mod data_loss;
mod decode_state;
mod dispatch;
mod envoy_keys;
mod health;
mod key_encoding;
mod last_replies;
mod late_replies;
mod many_debits;
mod named;
mod permit_sets;
mod pipeline;
mod probe;
mod recompute;
mod records;
mod script;
mod script_args;
mod script_call;
mod server_error;
mod shard;
mod shard_request;
mod tls;
mod topology;

pub use config::{RedisConfig, RedisConfigError};
pub use named::MAX_STORES;
pub use records::RedisRecords;
pub use server_error::SettingNames;
pub use shard::ShardStatus;
pub use tls::{RedisTls, ServerNameCheck};

use config::Kind;
use damaged_keys::DamagedKeys;
use last_replies::LastReplies;
use late_replies::{CounterList, Counters, LateReplies};
use pipeline::{Command, ShardReply};
use script::Scripts;
use shard::Shared;
use shard_request::{Parts, Place, ShardRequest};
use smallvec::SmallVec;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tollgate_core::{
    Admission, Charge, Clock, Cost, CounterStore, Enforcement, LastKnown, LogThrottle, LossPolicy, Outcome,
    Outcomes, Permit, StoreError, SystemClock, Timestamp, UnitReturn,
};
use topology::Topology;

/// How much longer a request waits that is denied without an answer, because a limit guards something: a server that
/// pauses for a moment must not turn callers away. It never waits for a server whose breaker is open.
const GUARD_PATIENCE: Duration = Duration::from_millis(20);

/// Counters in Redis. Cheap to clone: clones share everything.
#[derive(Clone)]
pub struct RedisStore {
    shared: Arc<Shared>,
    topology: Arc<Topology>,
    /// Other stores by name, for the counters of rules that name one.
    named: named::NamedStores,
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

    fn start(config: RedisConfig, manual_clock: Option<Arc<dyn Clock>>, clock: Arc<dyn Clock>) -> Self {
        let shared = Arc::new(Shared {
            config,
            scripts: Arc::new(Scripts::new()),
            manual_clock,
            clock,
            mismatches: AtomicUsize::default(),
            late: LateReplies::default(),
            last_replies: LastReplies::new(),
            damaged_keys: DamagedKeys::default(),
            undo_failures: LogThrottle::default(),
        });
        Self { topology: Topology::start(Arc::clone(&shared)), shared, named: named::NamedStores::default() }
    }

    /// Returns the status of each server, those of the default store first.
    #[must_use]
    pub fn status(&self) -> Vec<ShardStatus> {
        let mut all = self.topology.status();
        for (name, store) in self.named.iter() {
            let named = |shard| ShardStatus { store: Some(name.to_owned()), ..shard };
            all.extend(store.topology.status().into_iter().map(named));
        }
        all
    }

    /// Returns the number of decisions on which a script and `Limit::step` differed. Not zero only through a bug.
    #[must_use]
    pub fn mismatches(&self) -> usize {
        let named = self.named.iter().map(|(_, store)| store);
        let each = std::iter::once(self).chain(named);
        each.map(|store| store.shared.mismatches.load(Ordering::Relaxed)).sum()
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
        let mut parts = self.parts(charges);
        let guards = charges.iter().any(|charge| charge.loss_policy == LossPolicy::AssumeExhausted);
        let until = self.deadline(left, if guards { GUARD_PATIENCE } else { Duration::ZERO });
        match parts.len() {
            0 => Ok(Outcomes {
                admission: Admission::Admitted,
                at: self.shared.manual_clock.as_ref().unwrap_or(&self.shared.clock).now(),
                per_charge: SmallVec::new(),
            }),
            1 => {
                let (place, request) = parts.remove(0);
                let layout = order(&request);
                let counters = Some(Counters::Borrowed(charges));
                let answer = self.send(Command::Charge, place, request, until, counters).await?;
                Ok(outcomes(answer.admission, [(layout.as_slice(), &answer)].into_iter()))
            }
            _ => {
                self.reject_open(&parts)?;
                // A task of its own: what was charged must be undone even if the caller leaves.
                let (sender, receiver) = oneshot::channel();
                let (store, counters) = (self.clone(), Counters::Borrowed(charges).list());
                tokio::spawn(async move {
                    let mut answers = Vec::new();
                    let charged = store.charge_slots(parts, until, counters, &mut answers).await;
                    if let Err(Ok(Outcomes { admission: Admission::Admitted, .. })) = sender.send(charged) {
                        store.undo_charges(&answers, Instant::now()).await;
                    }
                });
                let ended = |_| StoreError::Unavailable("its task has ended".to_owned());
                receiver.await.map_err(ended)?
            }
        }
    }

    /// Charges in several slots, of one store or several, concurrently, and undoes the charges if the request is denied.
    async fn charge_slots(
        &self,
        parts: Parts,
        until: Instant,
        counters: CounterList,
        answers: &mut Vec<(Place, ShardReply)>,
    ) -> Result<Outcomes, StoreError> {
        let mut asked = Vec::new();
        for (place, request) in parts {
            let (store, counters) = (self.clone(), Some(Counters::Listed(Arc::clone(&counters))));
            let indexes: Vec<usize> = request.charges.iter().map(|want| want.index).collect();
            let task =
                tokio::spawn(
                    async move { store.send(Command::Charge, place, request, until, counters).await },
                );
            asked.push((place, indexes, task));
        }
        let (mut failed, mut causes) = (Vec::new(), Vec::new());
        for (place, indexes, task) in asked {
            let ended = || StoreError::Unavailable("its task has ended".to_owned());
            match task.await.unwrap_or_else(|_| Err(ended())) {
                Ok(answer) => answers.push((place, answer)),
                Err(cause) => {
                    failed.extend(indexes);
                    causes.push(cause);
                }
            }
        }
        let each = answers.iter().flat_map(|(_, answer)| {
            let how = answer.request.charges.iter().map(|want| want.enforcement);
            how.zip(answer.outcomes.iter().map(|recomputed| &recomputed.outcome))
        });
        let admission = Outcomes::admission(each);
        if admission == Admission::Denied || !causes.is_empty() {
            self.undo_charges(answers, until).await;
        }
        if !causes.is_empty() {
            failed.sort_unstable();
            let cause = if causes.len() > 1 { StoreError::Several(causes) } else { causes.remove(0) };
            let alone = answers.is_empty();
            return Err(if alone { cause } else { StoreError::Partial { failed, cause: Box::new(cause) } });
        }
        let layouts: Vec<(ChargeOrder, &ShardReply)> =
            answers.iter().map(|(_, answer)| (order(&answer.request), answer)).collect();
        Ok(outcomes(admission, layouts.iter().map(|(layout, answer)| (layout.as_slice(), *answer))))
    }

    /// Undoes the charges of slots that admitted a denied request. It continues in the background if the caller cannot
    /// wait; until then the counters have fewer units, never more.
    async fn undo_charges(&self, answers: &[(Place, ShardReply)], until: Instant) {
        let mut tasks = Vec::new();
        for (place, answer) in answers {
            let takes =
                answer.request.charges.iter().any(|want| want.enforcement != Enforcement::Independent);
            if answer.admission == Admission::Admitted
                && takes
                && let Some(store) = self.store_at(place.store)
            {
                let work = Command::Undo { taken_at: answer.now, priors: answer.priors.clone() };
                tasks.push(store.undo(work, place.slot, answer.request.clone()));
            }
        }
        for task in tasks {
            let _ = tokio::time::timeout_at(until, task).await;
        }
    }

    /// Undoes a charge in the background.
    fn undo(&self, work: Command, slot: u16, request: Box<ShardRequest>) -> JoinHandle<()> {
        let store = self.clone();
        tokio::spawn(async move {
            let patient = Instant::now() + 10 * store.shared.config.deadline;
            if let Err(error) = dispatch::send_with_retry(&store, work, slot, request, patient, None).await
                && let Some(count) = store.shared.undo_failures.due(store.shared.clock.now())
            {
                tracing::warn!(%error, count, "charges of denied requests were not undone; they recover with time");
            }
        })
    }

    /// Undoes a charge whose reply came late, on the runtime of the pipeline that received it.
    fn undo_late(&self, work: Command, slot: u16, request: Box<ShardRequest>) {
        if tokio::runtime::Handle::try_current().is_ok() {
            drop(self.undo(work, slot, request));
        }
    }

    /// Sends debits and releases, each slot on its own, all of them.
    async fn send_each(
        &self,
        work: Command,
        parts: Parts,
        until: Instant,
        counters: Option<Counters<'_>>,
    ) -> Result<(), StoreError> {
        let all = parts.iter().map(|(_, request)| request.charges.len()).sum();
        let mut errors = Vec::new();
        for (place, request) in parts {
            let indexes: Vec<usize> = request.charges.iter().map(|want| want.index).collect();
            if let Err(error) = self.send(work.clone(), place, request, until, counters.clone()).await {
                errors.push((indexes, error));
            }
        }
        StoreError::of_debits(errors, all)
    }

    async fn send(
        &self,
        work: Command,
        place: Place,
        request: Box<ShardRequest>,
        until: Instant,
        counters: Option<Counters<'_>>,
    ) -> Result<ShardReply, StoreError> {
        let store = self.store_at(place.store).ok_or_else(named::not_configured)?;
        dispatch::send_with_retry(store, work, place.slot, request, until, counters).await
    }

    fn deadline(&self, left: Duration, more: Duration) -> Instant {
        Instant::now() + left.min(self.shared.config.deadline + more)
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
            layout.iter().zip(&answer.outcomes).map(move |((index, enforcement), recomputed)| {
                (*index, recomputed.resolve(admission, *enforcement))
            })
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
        if charges.len() > many_debits::MAX_TOGETHER {
            return self.debit_many(charges).await;
        }
        let parts = self.parts(charges);
        let counters = Some(Counters::Borrowed(charges));
        self.send_each(Command::Debit, parts, self.deadline(Duration::MAX, Duration::ZERO), counters).await
    }

    async fn release(&self, permits: &[Permit<'_>]) -> Result<(), StoreError> {
        let parts =
            shard_request::from_permits(permits, |scope| self.layout_of(scope), &self.shared.config.hashing);
        self.send_each(Command::Release, parts, self.deadline(Duration::MAX, Duration::ZERO), None).await
    }

    async fn return_units(&self, back: &UnitReturn<'_>) -> Result<(), StoreError> {
        // A number under a key of envoyproxy/ratelimit: it has no mark that units were returned, and its window is by this
        // node's clock.
        let charge = Charge::new(back.key, back.limit, Cost::refund(back.units));
        let shared_at = self.parts(&[charge]).first().and_then(|(_, part)| part.envoy_at);
        if let Some(now) = shared_at {
            let is_same = back.limit.refundable(back.units, back.taken_at, now) == back.units;
            return if is_same { self.debit(&[charge]).await } else { Ok(()) };
        }
        let parts =
            shard_request::from_unit_return(back, |scope| self.layout_of(scope), &self.shared.config.hashing);
        self.send_each(
            Command::ReturnUnits { taken_at: back.taken_at, full_at: back.full_at },
            parts,
            self.deadline(Duration::MAX, Duration::ZERO),
            None,
        )
        .await
    }

    fn last_known(&self, charge: &Charge<'_>) -> Option<LastKnown> {
        let bundle = key_encoding::bundle(&charge.key, &self.shared.config.hashing);
        let name = key_encoding::member(charge.key.scope);
        let store = self.store_at(self.layout_of(charge.key.scope).0)?;
        store.shared.last_replies.get(&bundle, &name, store.shared.clock.now())
    }

    /// The default store alone: a named one that is down takes only its own counters with it.
    fn is_down(&self) -> bool {
        self.topology.is_down()
    }
}
