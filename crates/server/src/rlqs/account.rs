//! Account of one bucket on one stream: its demand, its assignment, and the units charged for it. Pure, with `now` as an
//! argument.
//!
//! **Invariant.** For every account, every limit of its bucket and every instant x from now until its assignment has expired:
//!
//! 1. the limit's units in escrow that are still valid at x are at least the *exposure* at x, the most that the stream may admit
//!    from x on: `max_tokens` + rate × the time that is left;
//! 2. the units in escrow since the last report are at least the most that the stream may have admitted since then and
//!    may still admit.
//!
//! By 1 and 2 every admission can be matched with a charged unit whose slot has not begun (Hall's condition for nested
//! sets of deadlines). The lease proof (`docs/internals/lease-proof.md`) then bounds everything that is admitted in any
//! time t, by streams and by checks together, by burst + rate × t. A stream that is lost, reconnects or stays silent
//! changes nothing: its exposure lasts until the assignment expires, and the units were charged before. Exposure is
//! linear in x and the number of valid units concave until a charge has lapsed, so 1 is checked at those instants.
//!
//! Each limit is charged for what its own units do not cover ([`super::limit_escrow`]). Units of windows beyond what 1 and 2
//! need cannot be spent, and are returned: when a share shrinks, when a bucket is abandoned, and when the assignment of a lost
//! stream has expired (what it may have admitted since its last report stays charged).
//!
//! Assumptions, beside those of leases: an assignment takes effect within [`GUARD`] after it was sent, and its time to
//! live counts from then.
//!
//! Limits whose burst is too short to cover a whole time to live (at least one second) are covered until whatever the
//! next pass of a running server sends has taken effect ([`Cover::NextPass`]): the exposure is then what the stream may
//! admit until that instant, and passes come more often. If the server dies, or a stream is lost and others take the units
//! that its last second needs, at most one such time to live is not covered. Windows are covered until they end, and charged
//! again in the next pass.

use super::assignment::{Assignment, Tokens};
use super::ledger::Unspent;
use super::limit_escrow::{Exposed, LimitEscrow, Past};
use super::sent::{Cover, GUARD, PASS, SHORT_PASS, Sent, Terms, UNTIL_NEXT_PASS, plus};
use smallvec::SmallVec;
use tollgate_core::{TimeDelta, Timestamp};
use tollgate_engine::CounterAhead;

/// Time to live of blanket rules in seconds.
pub(super) const BLANKET_TTL: u64 = 10;
/// A blanket rule is sent again when it lasts no longer than this.
const BLANKET_RENEWED: TimeDelta = TimeDelta::from_secs(4);
/// Passes in which what was admitted without an assignment is tried to be charged, while others take what the limits have.
const MAX_TRIES: u32 = 8;
/// Number of reports without requests after which a bucket is abandoned.
const IDLE_REPORTS: u32 = 12;
/// Demand is measured over at least this long.
const MIN_MEASURED: TimeDelta = TimeDelta::from_millis(1_000);
/// Share of the reported demand that is assigned beyond it, for growth.
const HEADROOM: f64 = 1.25;
/// An assignment is kept if the new rate is within these bounds of it: a changed one may start full.
const KEPT: std::ops::RangeInclusive<f64> = 0.96..=1.25;
/// The same where the cover lasts until the next pass only: little of the burst is then left for growth.
const SHORT_KEPT: std::ops::RangeInclusive<f64> = 0.96..=1.05;
/// The same of windows, where a change costs units of the current one until the next report.
const WINDOW_KEPT: std::ops::RangeInclusive<f64> = 0.8..=1.25;
/// The same of windows if the stream wants more than its share: the growth is worth the change.
const SCARCE_KEPT: std::ops::RangeInclusive<f64> = 0.8..=1.08;

/// Whether an account is to be charged and assigned in a pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Due {
    /// Nothing is to be done.
    No,
    /// When it is its turn. Until then the client uses what it has, as long as that lasts.
    InTurn,
    /// As soon as possible: its assignment is no longer covered.
    Now,
}

/// Units to charge for an account.
#[derive(Clone, Debug, Default)]
pub(super) struct Want {
    /// By counter.
    pub(super) each: SmallVec<[(u64, u64); 2]>,
    /// Of limits that are not known yet.
    other: u64,
}

impl Want {
    fn new(each: impl Iterator<Item = (u64, u64)>, other: u64) -> Self {
        Self { each: each.collect(), other }
    }

    /// Returns the units of a counter.
    pub(super) fn of(&self, counter: u64) -> u64 {
        self.each.iter().find(|(own, _)| *own == counter).map_or(self.most(), |(_, units)| *units)
    }

    /// Returns the counters whose idle slots it takes.
    pub(super) fn padding(&self, idle: impl Fn(u64) -> u64) -> SmallVec<[u64; 2]> {
        let takes = |(counter, units): &&(u64, u64)| idle(*counter) > 0 && *units >= idle(*counter);
        self.each.iter().filter(takes).map(|(counter, _)| *counter).collect()
    }

    /// Limits it to what remains of each counter. If one has less than the `least` assignment needs, only the `debt` is charged, to
    /// each of the others.
    pub(super) fn limit(&mut self, least: &Self, debt: u64, remaining: impl Fn(u64) -> u64) {
        let is_vain = least.each.iter().any(|(counter, units)| remaining(*counter) < *units);
        for (counter, units) in &mut self.each {
            *units = remaining(*counter).min(if is_vain { debt } else { *units });
        }
        self.other = 0;
    }

    /// Returns the most units of any counter.
    pub(super) fn most(&self) -> u64 {
        self.each.iter().map(|(_, units)| *units).fold(self.other, u64::max)
    }
}

/// One bucket on one stream.
#[derive(Debug)]
pub(super) struct Account {
    /// Its limits; none until they are known.
    limits: SmallVec<[LimitEscrow; 1]>,
    sent: Option<Sent>,
    /// What may have been admitted since `settled` by assignments before the current one.
    past: Past,
    settled: Timestamp,
    /// Requests since `measured`.
    requests: u64,
    measured: Timestamp,
    /// Requests per second; `None` until they have been measured.
    demand: Option<f64>,
    /// Share of the limits.
    pub(super) share: f64,
    pub(super) terms: Option<Terms>,
    /// Requests that were admitted without an assignment by tokens, and have not been charged.
    uncharged: u64,
    /// Passes in which these could not be charged, though the limits had units.
    tries: u32,
    idle_reports: u32,
    has_news: bool,
    retry_at: Timestamp,
    /// A planted bug: units that were reported as spent stay in escrow.
    #[cfg(test)]
    pub(super) spends_twice: bool,
    /// A planted bug: units are returned that the stream may still spend.
    #[cfg(test)]
    pub(super) returns_all: bool,
}

impl Account {
    /// Creates the account of a bucket that a stream has reported for the first time.
    pub(super) fn new(allowed: u64, now: Timestamp) -> Self {
        Self {
            limits: SmallVec::new(),
            sent: None,
            past: Past::default(),
            settled: now,
            requests: 0,
            measured: now,
            demand: None,
            share: 0.0,
            terms: None,
            uncharged: allowed,
            tries: 0,
            idle_reports: 0,
            has_news: true,
            retry_at: now,
            #[cfg(test)]
            spends_twice: false,
            #[cfg(test)]
            returns_all: false,
        }
    }

    /// Records a report.
    pub(super) fn report(&mut self, allowed: u64, denied: u64, now: Timestamp) {
        // More than the account could admit was admitted without an assignment, by the client's own configuration.
        let own = allowed.min(self.past_until(now));
        self.uncharged = self.uncharged.saturating_add(allowed - own);
        #[cfg(test)]
        let own = if self.spends_twice { 0 } else { own };
        let settled = self.settled;
        let exposed = self.sent.map(|sent| Exposed { sent, past: &self.past, replaces: None, settled });
        let read = Timestamp::from_micros(now.as_micros().saturating_sub(GUARD.as_micros())).max(settled);
        for limit in &mut self.limits {
            limit.spend(own, exposed.as_ref(), settled, now);
            limit.forget(read);
        }
        (self.past, self.settled) = (Past::after_report(self.sent.as_ref(), read), read);
        self.requests = self.requests.saturating_add(allowed).saturating_add(denied);
        self.idle_reports = if allowed == 0 && denied == 0 { self.idle_reports.saturating_add(1) } else { 0 };
        self.has_news = true;
        let passed = now.since(self.measured);
        if passed >= MIN_MEASURED {
            self.demand = Some(self.requests as f64 * 1e6 / passed.as_micros() as f64);
            (self.requests, self.measured) = (0, now);
        }
    }

    /// Returns the rate to claim; `None` if demand is not known yet.
    pub(super) fn want(&self) -> Option<f64> {
        self.demand.map(|demand| demand * HEADROOM)
    }

    /// Returns whether the bucket has been idle for so long that it is abandoned.
    pub(super) fn is_abandoned(&self, now: Timestamp) -> bool {
        self.idle_reports >= IDLE_REPORTS && self.is_spent(now)
    }

    /// Returns whether nothing of its assignments can be admitted anymore.
    pub(super) fn is_spent(&self, now: Timestamp) -> bool {
        self.sent.as_ref().is_none_or(|sent| sent.exposure(now) == 0)
    }

    /// Returns the units of a counter in escrow.
    pub(super) fn held(&self, counter: u64, now: Timestamp) -> u64 {
        let own = self.limits.iter().find(|limit| limit.counter == counter);
        own.map_or(0, |limit| limit.held(self.exposed().as_ref(), self.settled, now))
    }

    /// Returns what the stream may have admitted since its last report, and may still admit.
    fn exposed(&self) -> Option<Exposed<'_>> {
        let (past, settled) = (&self.past, self.settled);
        self.sent.map(|sent| Exposed { sent, past, replaces: None, settled })
    }

    /// Returns the units that this account has been assigned and may still admit.
    pub(super) fn outstanding(&self, now: Timestamp) -> u64 {
        self.sent.as_ref().map_or(0, |sent| sent.exposure(now))
    }

    /// Returns whether the account is due. News that change nothing are forgotten.
    pub(super) fn due(&mut self, now: Timestamp) -> Due {
        let in_turn = |is_due| if is_due { Due::InTurn } else { Due::No };
        let Some(terms) = self.terms else {
            // A bucket without limits, as far as known: requests are charged when they are reported.
            return in_turn(self.has_news || now >= self.retry_at);
        };
        if self.idle_reports >= IDLE_REPORTS {
            return Due::No;
        }
        let due = match &self.sent {
            None => Due::InTurn,
            Some(sent) if sent.assignment == Assignment::DenyAll => in_turn(now >= self.retry_at),
            Some(_) if !self.is_covered(now) => Due::Now,
            Some(sent) => {
                let changes = || self.uncharged > 0 || sent.tokens() != Some(self.target());
                let is_reported = self.has_news && (sent.is_renewable(now) || changes());
                in_turn(is_reported || self.tries > 0 || sent.is_late(terms.cover, now))
            }
        };
        self.has_news &= due != Due::No;
        due
    }

    /// Returns the units to charge for an account that is due; zero is a peek. `idle` is the number of a counter's slots that
    /// begin before the end of the cover and that no stream has taken: units taken now begin with those.
    pub(super) fn charge(&mut self, idle: impl Fn(u64) -> u64, now: Timestamp) -> Want {
        self.has_news &= self.terms.is_none();
        self.lack(idle, now)
    }

    /// Returns whether requests were admitted without an assignment that have not been charged.
    pub(super) const fn has_debt(&self) -> bool {
        self.uncharged > 0
    }

    /// Returns the number of these requests.
    pub(super) const fn debt(&self) -> u64 {
        self.uncharged
    }

    /// Records that the limits have been charged all they had, or cannot be charged: what was admitted beyond that exceeds the
    /// limit, and later requests do not pay for it. A report of any number would otherwise deny everyone for as long.
    pub(super) const fn forgive(&mut self) {
        (self.uncharged, self.tries) = (0, 0);
    }

    /// Records that the limits had units and yet denied them: others were faster, so it is tried again in the next pass.
    pub(super) const fn try_again(&mut self) {
        self.tries += 1;
        if self.tries >= MAX_TRIES {
            self.forgive();
        }
    }

    /// Returns what to charge for an account whose stream is lost: what keeps its assignment covered, and what it has reported.
    pub(super) fn charge_after_loss(&self, idle: impl Fn(u64) -> u64, now: Timestamp) -> Want {
        let each = self.limits.iter().map(|limit| {
            let uncovered = self.exposed().map_or(0, |of| limit.uncovered(&of, idle(limit.counter), now));
            (limit.counter, uncovered.saturating_add(self.uncharged))
        });
        Want::new(each, self.uncharged)
    }

    /// Returns whether the assignment of a lost stream is not covered until it expires.
    pub(super) fn is_uncovered(&self, now: Timestamp) -> bool {
        self.exposed().is_some_and(|of| self.limits.iter().any(|limit| limit.uncovered(&of, 0, now) > 0))
    }

    /// Returns the time to live of a new assignment.
    fn ttl(&self, terms: Terms) -> TimeDelta {
        if self.demand.is_some() { terms.ttl } else { terms.first_ttl }
    }

    /// Returns the time for which the escrow of a new assignment must suffice without another charge.
    pub(super) fn cover(&self) -> TimeDelta {
        self.terms.map_or(TimeDelta::ZERO, |terms| match terms.cover {
            Cover::Expiry => plus(self.ttl(terms), GUARD),
            Cover::NextPass => UNTIL_NEXT_PASS,
        })
    }

    /// Returns whether the account needs a charge in every pass.
    pub(super) fn is_short(&self) -> bool {
        self.terms.is_some_and(|terms| terms.cover == Cover::NextPass)
    }

    /// Returns the rate that its assignment allows, until it has expired.
    pub(super) fn rate(&self, now: Timestamp) -> f64 {
        let sent = self.sent.as_ref().filter(|sent| now < sent.expires);
        sent.and_then(Sent::tokens).map_or(0.0, Tokens::rate)
    }

    /// Returns whether the escrow covers the assignment for as long as the next pass needs, and now with regard to
    /// windows.
    fn is_covered(&self, now: Timestamp) -> bool {
        let Some(of) = self.exposed().filter(|of| now < of.sent.expires) else { return true };
        let until = self.covered_until(&of.sent, now);
        self.limits.iter().all(|limit| limit.covers(&of, until, now))
    }

    fn covered_until(&self, sent: &Sent, now: Timestamp) -> Timestamp {
        self.terms.map_or(sent.expires, |terms| terms.covered_until(sent.expires, now))
    }

    /// Returns the bucket to assign for the share: the current one, unless the share has changed much.
    fn target(&self) -> Tokens {
        let has_windows = self.limits.iter().any(LimitEscrow::has_window);
        let kept = match self.is_short() {
            false if has_windows && self.want().is_some_and(|want| want > self.share) => SCARCE_KEPT,
            _ if has_windows => WINDOW_KEPT,
            true => SHORT_KEPT,
            false => KEPT,
        };
        let fresh = Tokens::for_rate(self.share);
        match self.sent.as_ref().and_then(Sent::tokens) {
            Some(current) if kept.contains(&(fresh.rate() / current.rate())) => current,
            Some(current) => fresh.distinct_from(current),
            None => fresh,
        }
    }

    /// Returns the most that may have been admitted since the last report, until `until`.
    fn past_until(&self, until: Timestamp) -> u64 {
        let own = self.sent.map_or(0, |sent| sent.own(self.settled, until));
        self.past.since(self.settled).saturating_add(own)
    }

    /// Returns what would be sent, with what may have been admitted since the last report.
    fn proposal(&self, tokens: Tokens, ttl: TimeDelta, now: Timestamp) -> Exposed<'_> {
        let (past, settled) = (&self.past, self.settled);
        let (assignment, expires) = (Assignment::Tokens(tokens), now + plus(ttl, GUARD));
        match self.sent {
            // An unchanged bucket is not refilled; only its time is extended. If it may have expired before this arrives,
            // the client starts a new one.
            Some(sent) if sent.assignment == assignment && now + GUARD < sent.lasts => {
                let sent = Sent { expires: expires.max(sent.expires), lasts: now + ttl, ttl, ..sent };
                Exposed { sent, past, replaces: None, settled }
            }
            replaces => {
                let replaced = now + plus(GUARD, GUARD);
                let residue = replaces.map_or(0, |sent| sent.residue_at(now));
                let sent =
                    Sent { assignment, started: now, expires, lasts: now + ttl, ttl, residue, replaced };
                Exposed { sent, past, replaces, settled }
            }
        }
    }

    /// Records what is sent.
    fn send(&mut self, sent: Sent, replaces: Option<Sent>) {
        if let Some(before) = replaces {
            self.past.push(before, sent.replaced, self.settled);
        }
        self.sent = Some(sent);
    }

    /// Returns whether the escrow has all units that this needs.
    fn suffices_for(&self, of: &Exposed<'_>, now: Timestamp) -> bool {
        let until = self.covered_until(&of.sent, now);
        !self.limits.is_empty() && self.limits.iter().all(|limit| limit.missing(of, until, now) == (0, 0))
    }

    /// Returns how many units of each limit the target still lacks, with those that were admitted without an assignment.
    pub(super) fn lack(&self, idle: impl Fn(u64) -> u64, now: Timestamp) -> Want {
        let Some(terms) = self.terms else { return Want::new([].into_iter(), self.uncharged) };
        let mut want = self.need(self.target(), self.ttl(terms), idle, now);
        want.each.iter_mut().for_each(|(_, units)| *units = units.saturating_add(self.uncharged));
        want.other = self.uncharged;
        want
    }

    /// Returns how many units of each limit the smallest assignment lacks.
    pub(super) fn least(&self, idle: impl Fn(u64) -> u64, now: Timestamp) -> Want {
        self.need(self.bucket(0.0), TimeDelta::from_secs(1), idle, now)
    }

    fn need(&self, tokens: Tokens, ttl: TimeDelta, idle: impl Fn(u64) -> u64, now: Timestamp) -> Want {
        let of = self.proposal(tokens, ttl, now);
        let until = self.covered_until(&of.sent, now);
        let each = self.limits.iter();
        let each = each.map(|limit| (limit.counter, limit.need(&of, until, idle(limit.counter), now)));
        Want::new(each, 0)
    }

    /// Returns a bucket for this rate that Envoy sees as a change of the current one if it is one.
    fn bucket(&self, rate: f64) -> Tokens {
        let (fresh, old) = (Tokens::for_rate(rate), self.sent.as_ref().and_then(Sent::tokens));
        old.map_or(fresh, |old| fresh.distinct_from(old))
    }

    /// Returns the most tranches of a limit in escrow.
    #[cfg(test)]
    pub(super) fn tranches(&self) -> usize {
        self.limits.iter().map(LimitEscrow::tranches).max().unwrap_or(0)
    }

    /// Records which limits the bucket has. What was charged to others is not asked for anymore.
    pub(super) fn set_limits(&mut self, counters: &[CounterAhead], taken: Timestamp) {
        self.limits.retain(|limit| counters.iter().any(|counter| counter.counter == limit.counter));
        for counter in counters {
            let known = self.limits.iter().position(|limit| limit.counter == counter.counter);
            let at = known.unwrap_or_else(|| {
                self.limits.push(LimitEscrow::new(counter.counter));
                self.limits.len() - 1
            });
            self.limits[at].learn(counter, taken);
        }
    }

    /// Adds what was charged: of each counter the requests that its units are for, and the time by the store's clock if they
    /// can be returned. Those admitted without an assignment are paid first, to each limit. Returns the most of any counter.
    pub(super) fn add<'c>(
        &mut self,
        charged: impl Iterator<Item = (&'c CounterAhead, u64, Option<Timestamp>)>,
        taken: Timestamp,
    ) -> u64 {
        let (mut paid, mut most) = (self.uncharged, 0);
        let mut added: SmallVec<[u64; 2]> = SmallVec::new();
        for (counter, requests, taken_at) in charged {
            let own = self.limits.iter_mut().find(|limit| limit.counter == counter.counter);
            let Some(limit) = own.filter(|_| !added.contains(&counter.counter)) else { continue };
            let past = requests.min(self.uncharged);
            limit.add(requests - past, counter, taken, taken_at);
            added.push(counter.counter);
            (paid, most) = (paid.min(past), most.max(requests));
        }
        self.uncharged -= if added.is_empty() { 0 } else { paid };
        self.tries = 0;
        most
    }

    /// Removes and returns the units of windows that the stream has not spent and cannot spend: those in escrow beyond what
    /// both parts of the invariant need.
    pub(super) fn unspent(&mut self, now: Timestamp) -> SmallVec<[Unspent; 1]> {
        #[cfg(test)]
        if self.returns_all {
            return self.limits.iter_mut().flat_map(|limit| limit.give_back(u64::MAX, now)).collect();
        }
        let (settled, is_spent) = (self.settled, self.is_spent(now));
        let of = self.sent.map(|sent| Exposed { sent, past: &self.past, replaces: None, settled });
        self.limits.iter_mut().flat_map(|limit| limit.unspent(of.as_ref(), settled, is_spent, now)).collect()
    }

    /// Assigns a blanket rule until `retry_at`.
    pub(super) fn assign_blanket(
        &mut self,
        assignment: Assignment,
        retry_at: Timestamp,
        now: Timestamp,
    ) -> (Assignment, u64) {
        let (replaced, ttl) = (now + plus(GUARD, GUARD), TimeDelta::from_secs(BLANKET_TTL));
        let residue = self.sent.as_ref().map_or(0, |sent| sent.residue_at(now));
        let expires = now + plus(ttl, GUARD);
        let sent = Sent { assignment, started: now, expires, lasts: now + ttl, ttl, residue, replaced };
        self.send(sent, self.sent);
        if assignment == Assignment::AllowAll {
            self.forgive();
        }
        (self.has_news, self.retry_at) = (false, retry_at);
        (assignment, BLANKET_TTL)
    }

    /// Returns whether the current assignment is the target and needs only the units that were just charged: where the cover
    /// lasts until the next pass, not every charge has to be sent.
    fn suffices(&self, terms: Terms, now: Timestamp) -> bool {
        self.sent.is_some_and(|sent| {
            terms.cover == Cover::NextPass
                && sent.tokens() == Some(self.target())
                && !sent.is_late(terms.cover, now)
                && self.exposed().is_some_and(|of| self.suffices_for(&of, now))
        })
    }

    /// Assigns the largest part of the target that the escrow covers, and returns it with its time to live in seconds.
    /// `None` if nothing is to be sent: the current assignment lasts.
    pub(super) fn assign(&mut self, now: Timestamp) -> Option<(Assignment, u64)> {
        let terms = self.terms?;
        self.has_news = false;
        if self.suffices(terms, now) {
            return None;
        }
        let target = self.target();
        let mut best: Option<(Tokens, TimeDelta)> = None;
        let ttl = self.ttl(terms);
        for ttl in [ttl, TimeDelta::from_micros(ttl.as_micros() / 3), TimeDelta::from_secs(1)] {
            let ttl = TimeDelta::from_secs((ttl.as_micros() / 1_000_000).max(1));
            let found = self.largest(target, ttl, now);
            if found.is_some_and(|found| best.is_none_or(|(best, _)| found.rate() > best.rate() * 1.5)) {
                best = found.map(|found| (found, ttl));
            }
        }
        let Some((tokens, ttl)) = best else {
            let lasts = self.sent.is_some_and(|sent| match sent.assignment {
                Assignment::Tokens(_) => now + PASS + GUARD < sent.expires && self.is_covered(now),
                Assignment::DenyAll => now + BLANKET_RENEWED < sent.lasts,
                Assignment::AllowAll => false,
            });
            let pause = match terms.cover {
                Cover::Expiry => TimeDelta::from_secs(1),
                Cover::NextPass => SHORT_PASS,
            };
            // A window that has ended has all its units again.
            let ends = self.limits.iter().filter_map(|limit| limit.window_end(now));
            let retry_at = ends.fold(now + pause, Timestamp::min);
            self.retry_at = retry_at;
            return (!lasts).then(|| self.assign_blanket(Assignment::DenyAll, retry_at, now));
        };
        let Exposed { sent, replaces, .. } = self.proposal(tokens, ttl, now);
        self.send(sent, replaces);
        Some((sent.assignment, ttl.as_micros() / 1_000_000))
    }

    /// Returns the fastest bucket up to `target` that the escrow covers.
    fn largest(&self, target: Tokens, ttl: TimeDelta, now: Timestamp) -> Option<Tokens> {
        let fits = |tokens: &Tokens| self.suffices_for(&self.proposal(*tokens, ttl, now), now);
        if fits(&target) {
            return Some(target);
        }
        let at = |rate: f64| self.bucket(rate);
        let (mut low, mut high) = (None, target.rate());
        let mut step = high / 2.0;
        high = step;
        for _ in 0..8 {
            let tokens = at(high);
            step /= 2.0;
            if fits(&tokens) {
                low = Some(tokens);
                high += step;
            } else {
                high -= step;
            }
        }
        low.or_else(|| Some(at(0.0)).filter(fits))
    }
}
