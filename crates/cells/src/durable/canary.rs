//! Canaries: counters of this process in the store, used up for a day. If one is unused, the store has lost its
//! counters, or a part of them: it was emptied, replaced, or has started anew. A canary counts once the store has answered
//! that it is written: one that was late to be written is no loss. While none counts, those of all processes do.
//!
//! Others have no process in their names, and all processes use them up: they tell a new process whether the store has lost
//! its counters while none ran, or has not. The first process that finds them unused also leaves a mark for a minute, so
//! that all processes that start together know of the loss.
//!
//! A server's run id was rejected as the sign: emptying a server does not change it, and a store in memory has none.
//! Several canaries with different values lie in different shards of a cluster.

use futures_util::future::join_all;
use std::sync::atomic::{AtomicBool, Ordering};
use tollgate_core::{
    Algorithm, Charge, Cost, CounterKey, CounterStore, Enforcement, KeyPart, Limit, LimitError, LimitSpec,
    Outcome, Rate, Scope, StoreError, TimeDelta, Verdict,
};

/// Time for which a canary stays used up.
const LIFETIME: TimeDelta = TimeDelta::from_secs(86_400);
/// Time for which a store that has lost its counters is marked.
const NEW: TimeDelta = TimeDelta::from_secs(60);
/// What the names of all processes' canaries, and of marks, have in place of a process.
const ALL: &str = "";
const IS_NEW: &str = "|new";

/// The canaries of a process.
pub(super) struct Canaries {
    limit: Limit,
    limit_of_mark: Limit,
    scopes: Vec<Scope>,
    process: String,
    numbers: Vec<String>,
    /// Which canaries of this process the store has, as far as it answered.
    written: Box<[AtomicBool]>,
    /// Whether this process has tried to write them.
    is_begun: AtomicBool,
}

type Name<'a> = [KeyPart<'a>; 2];

impl Canaries {
    /// Creates canaries of a process, this many in each of the named stores and in the default one.
    pub(super) fn new(process: &str, stores: &[String], each: usize) -> Result<Self, LimitError> {
        let label = |store: &String| format!("{}tollgate|canary", Scope::store_prefix(store));
        let named = stores.iter().map(|store| Scope::new(label(store)));
        let lasting = |time| LimitSpec::new(Algorithm::Gcra, Rate::per(1, time)).build();
        let written = (0..each * (stores.len() + 1)).map(|_| AtomicBool::new(false)).collect();
        Ok(Self {
            written,
            is_begun: AtomicBool::new(false),
            limit: lasting(LIFETIME)?,
            limit_of_mark: lasting(NEW)?,
            scopes: std::iter::once(Scope::new("tollgate|canary")).chain(named).collect(),
            process: process.to_owned(),
            numbers: (0..each).map(|number| number.to_string()).collect(),
        })
    }

    fn names<'a>(&'a self, owner: &'a str) -> Vec<Name<'a>> {
        self.numbers.iter().map(|number| [KeyPart::Text(number), KeyPart::Text(owner)]).collect()
    }

    fn charges<'a>(&'a self, names: &'a [Name<'a>], limit: &'a Limit, cost: Cost) -> Vec<[Charge<'a>; 1]> {
        let each = self.scopes.iter().flat_map(|scope| names.iter().map(move |parts| (scope, parts)));
        let charge = |(scope, parts): (&'a Scope, &'a Name<'a>)| {
            let charge = Charge::new(CounterKey { scope, parts }, limit, cost);
            [Charge { enforcement: Enforcement::Independent, ..charge }]
        };
        each.map(charge).collect()
    }

    /// Returns whether a counter of these is used up, or whether one is not.
    async fn is_any<S: CounterStore>(
        &self,
        store: &S,
        owner: &str,
        limit: &Limit,
        is_looked_at: impl Fn(usize) -> bool,
        is_wanted: fn(&Outcome) -> bool,
    ) -> Result<bool, StoreError> {
        let names = self.names(owner);
        let charges = self.charges(&names, limit, Cost::PEEK);
        let looks = charges.iter().enumerate().filter(|(at, _)| is_looked_at(*at));
        let results = join_all(looks.map(|(_, charge)| store.charge(charge))).await;
        let is_wanted = |outcome: &Outcome| outcome.verdict != Verdict::Unknown && is_wanted(outcome);
        one_answered(results.into_iter().map(|result| Ok(result?.per_charge.iter().any(is_wanted))))
    }

    async fn use_up<S: CounterStore>(
        &self,
        store: &S,
        owner: &str,
        limit: &Limit,
    ) -> Vec<Result<(), StoreError>> {
        let names = self.names(owner);
        let charges = self.charges(&names, limit, Cost::ONE);
        join_all(charges.iter().map(|charge| store.debit(charge))).await
    }

    /// Returns whether a canary that this process has written is unused, or it has not begun to write them. One whose writing
    /// was not answered in time says nothing; if that is so for all, those of all processes count.
    pub(super) async fn is_lost<S: CounterStore>(&self, store: &S) -> Result<bool, StoreError> {
        let is_written = |at: usize| self.written[at].load(Ordering::Relaxed);
        if !(0..self.written.len()).any(is_written) {
            return Ok(!self.is_begun() || self.is_new(store).await?);
        }
        self.is_any(store, &self.process, &self.limit, is_written, |outcome| outcome.remaining > 0).await
    }

    /// Returns whether this process has tried to write its canaries: before that, none can be missed.
    pub(super) fn is_begun(&self) -> bool {
        self.is_begun.load(Ordering::Relaxed)
    }

    /// Returns whether the store has lost its counters since the last process marked it, or less than a minute ago.
    pub(super) async fn is_new<S: CounterStore>(&self, store: &S) -> Result<bool, StoreError> {
        let is_lost = self.is_any(store, ALL, &self.limit, |_| true, |outcome| outcome.remaining > 0).await?;
        let is_marked = |outcome: &Outcome| outcome.remaining == 0;
        Ok(is_lost || self.is_any(store, IS_NEW, &self.limit_of_mark, |_| true, is_marked).await?)
    }

    /// Uses all canaries up, after what was lost is known again. An error means that some may not be, and that they have to be
    /// renewed.
    pub(super) async fn write<S: CounterStore>(&self, store: &S) -> Result<(), StoreError> {
        self.written.iter().for_each(|written| written.store(false, Ordering::Relaxed));
        self.use_up_all(store).await
    }

    /// Uses all canaries up again, unless one is lost: then the store would seem to have lost nothing. An error means that this
    /// has to be done again.
    pub(super) async fn renew<S: CounterStore>(&self, store: &S) -> Result<(), StoreError> {
        match self.is_lost(store).await? {
            true => Err(StoreError::Unavailable("it has lost its canaries".to_owned())),
            false => self.use_up_all(store).await,
        }
    }

    async fn use_up_all<S: CounterStore>(&self, store: &S) -> Result<(), StoreError> {
        let mut results = Vec::new();
        if self.is_any(store, ALL, &self.limit, |_| true, |outcome| outcome.remaining > 0).await? {
            results = self.use_up(store, IS_NEW, &self.limit_of_mark).await;
        }
        results.extend(self.use_up(store, ALL, &self.limit).await);
        let own = self.use_up(store, &self.process, &self.limit).await;
        self.is_begun.store(true, Ordering::Relaxed);
        for (written, result) in self.written.iter().zip(&own) {
            // One that was written stays so for its lifetime.
            written.fetch_or(result.is_ok(), Ordering::Relaxed);
        }
        results.into_iter().chain(own).collect()
    }
}

/// Returns whether any result is true; an error only if all are, because a shard that does not answer is looked at when
/// it does.
fn one_answered(results: impl Iterator<Item = Result<bool, StoreError>>) -> Result<bool, StoreError> {
    let mut answer = Err(StoreError::Unavailable("no canary".to_owned()));
    for result in results {
        answer = match (answer, result) {
            (Ok(one), Ok(other)) => Ok(one || other),
            (Ok(one), Err(_)) => Ok(one),
            (Err(_), result) => result,
        };
    }
    answer
}
