//! Canaries: counters of this process in the store, used up for a day. If one is unused, the store has lost its
//! counters, or a part of them: it was emptied, replaced, or has started anew. A new process has none yet, so that it
//! reads back as well.
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

/// The canaries of a process.
pub(super) struct Canaries {
    limit: Limit,
    scopes: Vec<Scope>,
    process: String,
    numbers: Vec<String>,
}

impl Canaries {
    /// Creates canaries of a process, this many in each of the named stores and in the default one.
    pub(super) fn new(process: &str, stores: &[String], each: usize) -> Result<Self, LimitError> {
        let label = |store: &String| format!("{}tollgate|canary", Scope::store_prefix(store));
        let named = stores.iter().map(|store| Scope::new(label(store)));
        Ok(Self {
            limit: LimitSpec::new(Algorithm::Gcra, Rate::per(1, LIFETIME)).build()?,
            scopes: std::iter::once(Scope::new("tollgate|canary")).chain(named).collect(),
            process: process.to_owned(),
            numbers: (0..each).map(|number| number.to_string()).collect(),
        })
    }

    fn names(&self) -> Vec<[KeyPart<'_>; 2]> {
        self.numbers.iter().map(|number| [KeyPart::Text(number), KeyPart::Text(&self.process)]).collect()
    }

    fn charges<'a>(&'a self, names: &'a [[KeyPart<'a>; 2]], cost: Cost) -> Vec<[Charge<'a>; 1]> {
        let each = self.scopes.iter().flat_map(|scope| names.iter().map(move |parts| (scope, parts)));
        let charge = |(scope, parts): (&'a Scope, &'a [KeyPart<'a>; 2])| {
            let charge = Charge::new(CounterKey { scope, parts }, &self.limit, cost);
            [Charge { enforcement: Enforcement::Independent, ..charge }]
        };
        each.map(charge).collect()
    }

    /// Returns whether a canary is unused.
    pub(super) async fn is_lost<S: CounterStore>(&self, store: &S) -> Result<bool, StoreError> {
        let names = self.names();
        let charges = self.charges(&names, Cost::PEEK);
        let results = join_all(charges.iter().map(|charge| store.charge(charge))).await;
        let is_unused = |outcome: &Outcome| outcome.verdict != Verdict::Unknown && outcome.remaining > 0;
        one_answered(results.into_iter().map(|result| Ok(result?.per_charge.iter().any(is_unused))))
    }

    /// Uses all canaries up.
    pub(super) async fn renew<S: CounterStore>(&self, store: &S) -> Result<(), StoreError> {
        let names = self.names();
        let charges = self.charges(&names, Cost::ONE);
        let results = join_all(charges.iter().map(|charge| store.debit(charge))).await;
        one_answered(results.into_iter().map(|result| result.map(|()| false))).map(|_| ())
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
