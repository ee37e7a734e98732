//! Shedding of checks while the process itself is overloaded: charges of the least important classes go without the store, and
//! their rules' fail policy decides.
//!
//! Only checks that would wait for the store come here: what is decided in memory costs less than asking whether to. A
//! check whose limits have several classes is shed in part: the store still decides what is not shed, as in an outage of
//! one shard. Refunds are never shed.

use crate::decision::{DecisionDetails, Origin};
use crate::limiter::Limiter;
use tollgate_core::{Charge, CounterStore, Outcomes, StoreError, TimeDelta, Timestamp};
use tollgate_overload::{CheckLoad, CheckLoadState, ShedChange, ShedOrder};
use tollgate_rules::{Class, MatchedLimit, Plan};

/// Load of the process by its own checks; without a target nothing is measured or shed.
#[derive(Debug, Default)]
pub(crate) struct CheckShedding(Option<CheckLoad>);

/// A check that waits for the store. Dropping it ends the wait, for a client that leaves.
struct Waiting<'l> {
    load: &'l CheckLoad,
    clock: &'l dyn tollgate_core::Clock,
    began: Timestamp,
    /// Whether the store, or its deadline, ended the wait.
    is_answered: bool,
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        let now = self.clock.now();
        self.load.end(now, self.is_answered.then(|| now.since(self.began)));
    }
}

impl<S> Limiter<S> {
    /// Returns the load of the process by its own checks; `None` if they are not shed.
    #[must_use]
    pub fn check_load(&self) -> Option<CheckLoadState> {
        self.check_shedding.0.as_ref().map(|load| load.state(self.clock.now()))
    }
}

impl<S: CounterStore> Limiter<S> {
    /// Sheds checks by class while they wait for the store longer than `target` on average and dozens do at once: comfort
    /// first, then cost, then security and strict. Half of the store's deadline is a good target.
    #[must_use]
    pub fn with_check_shedding(mut self, target: TimeDelta) -> Self {
        self.check_shedding = CheckShedding(Some(CheckLoad::new(target, log)));
        self
    }

    /// Charges the store and measures how long that takes.
    pub(crate) async fn charge_awaited(&self, charges: &[Charge<'_>]) -> Result<Outcomes, StoreError> {
        let Some(load) = &self.check_shedding.0 else { return self.store.charge(charges).await };
        load.begin();
        let clock = &*self.clock;
        let mut waiting = Waiting { load, clock, began: clock.now(), is_answered: false };
        let charged = self.store.charge(charges).await;
        waiting.is_answered = charged.as_ref().map_or_else(is_late, |_| true);
        charged
    }

    /// Returns the charges of a request that go without the store now, as the error that the fail policy expects; `None` if
    /// there are none. `details` gets their class.
    pub(crate) fn shed_charges(&self, plan: &Plan<'_>, details: &mut DecisionDetails) -> Option<StoreError> {
        let load = self.check_shedding.0.as_ref()?;
        let upto = load.sheds_up_to(self.clock.now())?;
        let is_shed = |matched: &MatchedLimit<'_>| order(matched) <= upto && !matched.cost.is_refund();
        let failed: Vec<usize> = (0..plan.limits.len()).filter(|at| is_shed(&plan.limits[*at])).collect();
        let last = failed.iter().map(|at| order(&plan.limits[*at])).max()?;
        load.count_shed(last);
        details.shed_class = Some(last);
        let cause = Box::new(StoreError::Unavailable("the check is shed".to_owned()));
        Some(StoreError::Partial { failed, cause })
    }
}

/// Returns whether the store had its time and did not answer. An open breaker answers at once.
fn is_late(error: &StoreError) -> bool {
    match error {
        StoreError::Timeout | StoreError::Late(_) => true,
        StoreError::Partial { cause, .. } => is_late(cause),
        StoreError::Several(all) => all.iter().any(is_late),
        _ => false,
    }
}

/// Returns the place of a limit's charge in the order of shedding.
fn order(matched: &MatchedLimit<'_>) -> ShedOrder {
    match matched.rule.map_or(Class::Comfort, |rule| rule.class) {
        Class::Comfort => ShedOrder::Comfort,
        Class::Cost => ShedOrder::Cost,
        Class::Security | Class::Strict => ShedOrder::Security,
    }
}

impl DecisionDetails {
    /// Completes a decision whose check was shed: it says so if a shed charge could have denied the request.
    pub(crate) fn complete_shed(&mut self, has_decided: bool) {
        let Some(class) = self.shed_class.filter(|_| has_decided) else {
            self.shed_class = None;
            return;
        };
        if self.is_allowed() {
            self.origin = Origin::Shed;
        }
        self.reason.get_or_insert_with(|| reason(class).into());
    }
}

const fn reason(class: ShedOrder) -> &'static str {
    match class {
        ShedOrder::Comfort => "Tollgate is overloaded and sheds checks of class comfort",
        ShedOrder::Cost => "Tollgate is overloaded and sheds checks up to class cost",
        ShedOrder::Security => "Tollgate is overloaded and sheds checks of all classes",
    }
}

fn log(change: ShedChange) {
    let millis = |time: TimeDelta| time.as_micros() as f64 / 1e3;
    let (wait_ms, target_ms, pending) = (millis(change.wait), millis(change.target), change.pending);
    match change.after {
        Some(class) if change.after > change.before => tracing::warn!(
            wait_ms,
            target_ms,
            pending,
            "checks wait too long for the store; those up to class {} are shed in part, and their rules' on_error decides",
            class.name()
        ),
        Some(class) => tracing::info!(wait_ms, pending, "checks are shed up to class {}", class.name()),
        None => tracing::info!(wait_ms, pending, "checks are no longer shed"),
    }
}
