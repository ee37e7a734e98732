//! Canaries: counters of this process in the store, used up for a day. If one is unused, the store has lost its
//! counters, or a part of them: it was emptied, replaced, or has started anew. A new process has none yet, so that it
//! reads back as well.
//!
//! Others have no process in their names, and all processes use them up: they tell a new process whether the store has lost
//! its counters while none ran, or has not. The first process that finds them unused also leaves a mark for a minute, so
//! that all processes that start together know of the loss.
//!
//! A server's run id was rejected as the sign: emptying a server does not change it, and a store in memory has none.
//! Several canaries with different values lie in different shards of a cluster.

use futures_util::future::join_all;
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
}

type Name<'a> = [KeyPart<'a>; 2];

impl Canaries {
    /// Creates canaries of a process, this many in each of the named stores and in the default one.
    pub(super) fn new(process: &str, stores: &[String], each: usize) -> Result<Self, LimitError> {
        let label = |store: &String| format!("{}tollgate|canary", Scope::store_prefix(store));
        let named = stores.iter().map(|store| Scope::new(label(store)));
        let lasting = |time| LimitSpec::new(Algorithm::Gcra, Rate::per(1, time)).build();
        Ok(Self {
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
        is_wanted: fn(&Outcome) -> bool,
    ) -> Result<bool, StoreError> {
        let names = self.names(owner);
        let charges = self.charges(&names, limit, Cost::PEEK);
        let results = join_all(charges.iter().map(|charge| store.charge(charge))).await;
        let is_wanted = |outcome: &Outcome| outcome.verdict != Verdict::Unknown && is_wanted(outcome);
        one_answered(results.into_iter().map(|result| Ok(result?.per_charge.iter().any(is_wanted))))
    }

    async fn use_up<S: CounterStore>(&self, store: &S, owner: &str, limit: &Limit) -> Result<(), StoreError> {
        let names = self.names(owner);
        let charges = self.charges(&names, limit, Cost::ONE);
        let results = join_all(charges.iter().map(|charge| store.debit(charge))).await;
        one_answered(results.into_iter().map(|result| result.map(|()| false))).map(|_| ())
    }

    /// Returns whether a canary of this process is unused.
    pub(super) async fn is_lost<S: CounterStore>(&self, store: &S) -> Result<bool, StoreError> {
        self.is_any(store, &self.process, &self.limit, |outcome| outcome.remaining > 0).await
    }

    /// Returns whether the store has lost its counters since the last process marked it, or less than a minute ago.
    pub(super) async fn is_new<S: CounterStore>(&self, store: &S) -> Result<bool, StoreError> {
        let is_lost = self.is_any(store, ALL, &self.limit, |outcome| outcome.remaining > 0).await?;
        Ok(is_lost
            || self.is_any(store, IS_NEW, &self.limit_of_mark, |outcome| outcome.remaining == 0).await?)
    }

    /// Uses all canaries up.
    pub(super) async fn renew<S: CounterStore>(&self, store: &S) -> Result<(), StoreError> {
        if self.is_any(store, ALL, &self.limit, |outcome| outcome.remaining > 0).await? {
            self.use_up(store, IS_NEW, &self.limit_of_mark).await?;
        }
        self.use_up(store, ALL, &self.limit).await?;
        self.use_up(store, &self.process, &self.limit).await
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
