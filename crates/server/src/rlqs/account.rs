//! Account of one bucket on one stream: its demand, its assignment, and the units charged for it. Pure, with `now` as an
//! argument.
//!
//! **Invariant.** For every account and every instant x from now until its assignment has expired:
//!
//! 1. the units in escrow that are still valid at x are at least the *exposure* at x, the most that the stream may admit
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
//! Units of windows beyond what 1 and 2 need cannot be spent, and are returned: when a share shrinks, when a bucket is
//! abandoned, and when the assignment of a lost stream has expired (what it may have admitted since its last report stays
//! charged). So are units whose slots passed before a report, while a window beside them lasts.
//!
//! Assumptions, beside those of leases: an assignment takes effect within [`GUARD`] after it was sent, and its time to
//! live counts from then.
//!
//! Limits whose burst is too short to cover a whole time to live (at least one second) are covered until whatever the
//! next pass of a running server sends has taken effect ([`Cover::NextPass`]): the exposure is then what the stream may
//! admit until that instant, and passes come more often. If the server dies, or a stream is lost and others take the units
//! that its last second needs, at most one such time to live is not covered. Windows that end while an assignment lasts
//! are charged again in the next pass.

use super::assignment::{Assignment, Tokens};
use super::ledger::{Ledger, Unspent};
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
/// Units of windows are returned if they are more than one in so many of those in escrow. What is left over from one report is
/// used for the next renewal.
const RETURNED_PART: u64 = 4;

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

/// One bucket on one stream.
#[derive(Debug)]
pub(super) struct Account {
    ledger: Ledger,
    sent: Option<Sent>,
    /// Most that may have been admitted since `settled` by assignments before the current one.
    past: u64,
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
    /// Units whose slots have passed unused, to be returned to their windows.
    lapsed: SmallVec<[Unspent; 1]>,
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
            ledger: Ledger::default(),
            sent: None,
            past: 0,
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
            lapsed: SmallVec::new(),
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
        self.ledger.spend(own, self.settled);
        let read =
            Timestamp::from_micros(now.as_micros().saturating_sub(GUARD.as_micros())).max(self.settled);
        self.settled = read;
        self.lapsed.extend(self.ledger.forget(read));
        self.past = self.sent.as_ref().filter(|sent| read < sent.replaced).map_or(0, |sent| sent.residue);
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

    /// Returns the units in escrow.
    pub(super) fn held(&self, now: Timestamp) -> u64 {
        self.ledger.valid(now)
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

    /// Returns the units to charge for an account that is due; zero is a peek. `idle` is the number of slots that begin
    /// before the end of the cover and that no stream has taken: units taken now begin with those.
    pub(super) fn charge(&mut self, idle: u64, now: Timestamp) -> u64 {
        let Some(terms) = self.terms else { return self.uncharged };
        self.has_news = false;
        let need = self.padded_need(self.target(), self.ttl(terms), idle, now);
        need.saturating_add(self.uncharged)
    }

    /// Returns whether requests were admitted without an assignment that have not been charged.
    pub(super) const fn has_debt(&self) -> bool {
        self.uncharged > 0
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
    pub(super) fn charge_after_loss(&self, idle: u64, now: Timestamp) -> u64 {
        self.uncovered(idle, now).saturating_add(self.uncharged)
    }

    /// Returns what to charge for an account whose stream is lost, so that its assignment stays covered until it expires.
    /// Nothing unless the limit's burst is shorter than the time to live.
    pub(super) fn uncovered(&self, idle: u64, now: Timestamp) -> u64 {
        let (Some(sent), at) = (&self.sent, now + PASS + GUARD) else { return 0 };
        let later = self.shortfall(sent, (now, at), sent.expires);
        let at_once = sent.exposure(now).saturating_sub(self.ledger.valid(now));
        if later == 0 { at_once } else { at_once.max(later + idle) }
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
        let Some(sent) = self.sent.as_ref().filter(|sent| now < sent.expires) else { return true };
        let until = self.terms.map_or(sent.expires, |terms| terms.covered_until(sent.expires, now));
        let end = until.min(now + PASS);
        self.shortfall(sent, (now, end), until) == 0
            && sent.exposure_until(until, now) <= self.ledger.valid(now)
    }

    /// Returns the bucket to assign for the share: the current one, unless the share has changed much.
    fn target(&self) -> Tokens {
        let (fresh, kept) = (Tokens::for_rate(self.share), if self.is_short() { SHORT_KEPT } else { KEPT });
        match self.sent.as_ref().and_then(Sent::tokens) {
            Some(current) if kept.contains(&(fresh.rate() / current.rate())) => current,
            Some(current) => fresh.distinct_from(current),
            None => fresh,
        }
    }

    /// Returns the most that may have been admitted since the last report, until `until`.
    fn past_until(&self, until: Timestamp) -> u64 {
        self.past.saturating_add(self.sent.as_ref().map_or(0, |sent| sent.own(self.settled, until)))
    }

    /// Returns what would be sent, and the most that may have been admitted since the last report by other assignments.
    fn proposal(&self, tokens: Tokens, ttl: TimeDelta, now: Timestamp) -> (Sent, u64) {
        let (assignment, expires) = (Assignment::Tokens(tokens), now + plus(ttl, GUARD));
        match &self.sent {
            // An unchanged bucket is not refilled; only its time is extended. If it may have expired before this arrives,
            // the client starts a new one.
            Some(sent) if sent.assignment == assignment && now + GUARD < sent.lasts => {
                (Sent { expires: expires.max(sent.expires), lasts: now + ttl, ttl, ..*sent }, self.past)
            }
            sent => {
                let replaced = now + plus(GUARD, GUARD);
                let residue = sent.as_ref().map_or(0, |sent| sent.residue_at(now));
                let sent =
                    Sent { assignment, started: now, expires, lasts: now + ttl, ttl, residue, replaced };
                (sent, self.past_until(replaced))
            }
        }
    }

    /// Returns how many more units the escrow needs before this can be sent.
    fn need(&self, tokens: Tokens, ttl: TimeDelta, now: Timestamp) -> u64 {
        let (now_missing, at_end) = self.missing(tokens, ttl, now);
        now_missing.max(at_end)
    }

    /// Returns the units that are missing now, and those that are missing at the end of the cover.
    fn missing(&self, tokens: Tokens, ttl: TimeDelta, now: Timestamp) -> (u64, u64) {
        let (sent, past) = self.proposal(tokens, ttl, now);
        self.missing_for(&sent, past, now)
    }

    fn missing_for(&self, sent: &Sent, past: u64, now: Timestamp) -> (u64, u64) {
        let until = self.terms.map_or(sent.expires, |terms| terms.covered_until(sent.expires, now));
        let since_report = past.saturating_add(sent.own(self.settled, until));
        let at_once = sent.exposure_until(until, now).saturating_sub(self.ledger.valid(now));
        let since_report = since_report.saturating_sub(self.ledger.valid(self.settled));
        (at_once.max(since_report), self.shortfall(sent, (now, until), until))
    }

    /// Returns the most units that are missing at any instant between these two, for what may be admitted until `until`:
    /// exposure is linear, so only the ends of charges matter.
    fn shortfall(&self, sent: &Sent, (now, end): (Timestamp, Timestamp), until: Timestamp) -> u64 {
        let instants = self.ledger.ends().filter(|at| now < *at && *at < end).chain([end]);
        // At its very end, an assignment still has a full bucket.
        let missing = instants.map(|at| {
            let exposure = sent.exposure_until(until, Timestamp::from_micros(at.as_micros() - 1));
            exposure.saturating_sub(self.ledger.in_slots(at))
        });
        missing.max().unwrap_or(0)
    }

    /// Returns how many units to charge so that enough of them are valid at the end of the cover.
    fn padded_need(&self, tokens: Tokens, ttl: TimeDelta, idle: u64, now: Timestamp) -> u64 {
        match self.missing(tokens, ttl, now) {
            (at_once, 0) => at_once,
            (at_once, at_end) => at_once.max(at_end.saturating_add(idle)),
        }
    }

    /// Returns how many units the target still lacks, with those that were admitted without an assignment.
    pub(super) fn lack(&self, idle: u64, now: Timestamp) -> u64 {
        let need = self.terms.map_or(0, |terms| self.padded_need(self.target(), self.ttl(terms), idle, now));
        need.saturating_add(self.uncharged)
    }

    /// Returns the number of tranches in escrow.
    #[cfg(test)]
    pub(super) fn tranches(&self) -> usize {
        self.ledger.len()
    }

    /// Adds `units` that were charged. Those admitted without an assignment are paid first. `taken_at` is the time by the
    /// store's clock if they can be returned.
    pub(super) fn add(
        &mut self,
        units: u64,
        counters: &[CounterAhead],
        taken: Timestamp,
        taken_at: Option<Timestamp>,
    ) {
        let paid = units.min(self.uncharged);
        self.uncharged -= paid;
        self.tries = 0;
        self.ledger.add(units - paid, counters, taken, taken_at);
    }

    /// From now on, other counters are charged: what is in escrow cannot be returned.
    pub(super) fn change_counters(&mut self) {
        self.lapsed.clear();
        self.ledger.keep_all();
    }

    /// Removes and returns the units of windows that the stream has not spent and cannot spend: those in escrow beyond what
    /// both parts of the invariant need.
    pub(super) fn unspent(&mut self, now: Timestamp) -> SmallVec<[Unspent; 1]> {
        let mut unspent = std::mem::take(&mut self.lapsed);
        let (valid, since_report) = (self.ledger.valid(now), self.ledger.valid(self.settled));
        let expires = self.sent.as_ref().map_or(now, |sent| sent.expires);
        let surplus = valid
            .saturating_sub(self.outstanding(now))
            .min(since_report.saturating_sub(self.past_until(expires)));
        #[cfg(test)]
        let surplus = if self.returns_all { valid } else { surplus };
        if surplus.saturating_mul(RETURNED_PART) > valid || self.is_spent(now) {
            unspent.extend(self.ledger.give_back(surplus, now));
        }
        unspent
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
        self.past = self.past_until(replaced);
        let expires = now + plus(ttl, GUARD);
        self.sent =
            Some(Sent { assignment, started: now, expires, lasts: now + ttl, ttl, residue, replaced });
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
                && self.missing_for(&sent, self.past, now) == (0, 0)
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
            let retry_at = now + pause;
            self.retry_at = retry_at;
            return (!lasts).then(|| self.assign_blanket(Assignment::DenyAll, retry_at, now));
        };
        let (sent, past) = self.proposal(tokens, ttl, now);
        self.past = past;
        self.sent = Some(sent);
        Some((sent.assignment, ttl.as_micros() / 1_000_000))
    }

    /// Returns the fastest bucket up to `target` that the escrow covers.
    fn largest(&self, target: Tokens, ttl: TimeDelta, now: Timestamp) -> Option<Tokens> {
        let fits = |tokens: &Tokens| self.need(*tokens, ttl, now) == 0;
        if fits(&target) {
            return Some(target);
        }
        let old = self.sent.as_ref().and_then(Sent::tokens);
        let at =
            |rate: f64| old.map_or(Tokens::for_rate(rate), |old| Tokens::for_rate(rate).distinct_from(old));
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
