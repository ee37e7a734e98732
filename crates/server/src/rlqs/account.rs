//! Account of one bucket on one stream: its demand, its assignment, and the units charged for it. Pure, with `now` as an
//! argument.
//!
//! What all streams of a limit may admit is covered by units that were charged before ([`super::pool`]). A stream that is lost,
//! reconnects or stays silent changes nothing: what it may admit counts until the assignment expires.
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
use super::exposed::{Exposed, Past};
use super::sent::{Cover, GUARD, PASS, SHORT_PASS, Sent, Terms, UNTIL_NEXT_PASS, plus};
use tollgate_core::{TimeDelta, Timestamp};

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

/// An assignment is kept if the new one cannot be covered and its rate is within these bounds: another change costs more.
const NEAR: std::ops::RangeInclusive<f64> = 0.7..=1.1;

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
#[cfg_attr(test, derive(Clone))]
#[derive(Debug)]
pub(super) struct Account {
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
    /// Whether any of its limits has windows.
    pub(super) has_windows: bool,
    /// Requests that were admitted without an assignment by tokens, and have not been charged.
    uncharged: u64,
    /// Passes in which these could not be charged, though the limits had units.
    tries: u32,
    idle_reports: u32,
    has_news: bool,
    retry_at: Timestamp,
}

impl Account {
    /// Creates the account of a bucket that a stream has reported for the first time.
    pub(super) fn new(allowed: u64, now: Timestamp) -> Self {
        Self {
            sent: None,
            past: Past::default(),
            settled: now,
            requests: 0,
            measured: now,
            demand: None,
            share: 0.0,
            terms: None,
            has_windows: false,
            uncharged: allowed,
            tries: 0,
            idle_reports: 0,
            has_news: true,
            retry_at: now,
        }
    }

    /// Returns how many of the requests that a report says were allowed its assignments can have allowed. More were admitted
    /// without an assignment, by the client's own configuration.
    pub(super) fn assigned_part(&self, allowed: u64, now: Timestamp) -> u64 {
        self.exposed(now).map_or(0, |of| allowed.min(of.between(self.settled, now)))
    }

    /// Records a report, of which so many were allowed by assignments.
    pub(super) fn report(&mut self, (allowed, own): (u64, u64), denied: u64, now: Timestamp) {
        self.uncharged = self.uncharged.saturating_add(allowed - own);
        let read =
            Timestamp::from_micros(now.as_micros().saturating_sub(GUARD.as_micros())).max(self.settled);
        if let Some(sent) = &mut self.sent {
            sent.report(own, self.settled, read);
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

    /// Returns what the stream may have admitted since its last report, and may still admit.
    pub(super) fn exposed(&self, now: Timestamp) -> Option<Exposed<'_>> {
        let (past, settled) = (&self.past, self.settled);
        let of = |sent: Sent| Exposed {
            sent,
            past,
            replaces: None,
            settled,
            until: self.covered_until(sent.expires, now),
        };
        self.sent.map(of)
    }

    /// Returns the tokens that its assignment has gained since the last report, or since `start`.
    pub(super) fn gain_since(&self, start: Timestamp, now: Timestamp) -> u64 {
        self.sent.map_or(0, |sent| sent.gain(start.max(self.settled), now))
    }

    /// Returns the units that this account has been assigned and may still admit.
    pub(super) fn outstanding(&self, now: Timestamp) -> u64 {
        self.sent.as_ref().map_or(0, |sent| sent.exposure(now))
    }

    /// Returns whether the account is due. News that change nothing are forgotten.
    pub(super) fn due(&mut self, is_covered: bool, now: Timestamp) -> Due {
        let in_turn = |is_due| if is_due { Due::InTurn } else { Due::No };
        let Some(terms) = self.terms else {
            // A bucket without limits, as far as known: requests are charged when they are reported.
            return in_turn(self.has_news || now >= self.retry_at);
        };
        if self.idle_reports >= IDLE_REPORTS {
            self.has_news = false;
            return Due::No;
        }
        let due = match &self.sent {
            None => Due::InTurn,
            Some(sent) if sent.assignment == Assignment::DenyAll => in_turn(now >= self.retry_at),
            Some(_) if !is_covered => Due::Now,
            Some(sent) => {
                let changes = || self.uncharged > 0 || sent.tokens() != Some(self.target());
                let is_reported = self.has_news && (sent.is_renewable(now) || changes());
                in_turn(is_reported || self.tries > 0 || sent.is_late(terms.cover, now))
            }
        };
        self.has_news &= due != Due::No;
        due
    }

    /// Returns the earliest time at which the account may be due, without a report and while it is covered, or may be removed.
    pub(super) fn next_look(&self, is_lost: bool) -> Timestamp {
        let at_once = self.settled;
        let spent_at = || self.sent.map_or(at_once, |sent| sent.spent_at());
        if is_lost {
            return if self.has_debt() { at_once } else { spent_at() };
        }
        if self.has_news {
            return at_once;
        }
        let is_idle = self.idle_reports >= IDLE_REPORTS;
        match (self.terms, &self.sent) {
            (None, _) if is_idle => self.retry_at.min(spent_at()),
            (None, _) => self.retry_at,
            (Some(_), _) if is_idle => spent_at(),
            (Some(_), None) => at_once,
            (Some(_), Some(sent)) if sent.assignment == Assignment::DenyAll => self.retry_at,
            (Some(_), Some(_)) if self.tries > 0 => at_once,
            (Some(terms), Some(sent)) => sent.late_at(terms.cover),
        }
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

    /// Begins to serve the account: what it has heard of is being decided.
    pub(super) const fn begin(&mut self) {
        self.has_news &= self.terms.is_none();
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

    fn covered_until(&self, expires: Timestamp, now: Timestamp) -> Timestamp {
        self.terms.map_or(expires, |terms| terms.covered_until(expires, now))
    }

    /// Returns the bucket to assign for the share: the current one, unless the share has changed much.
    fn target(&self) -> Tokens {
        let kept = match self.is_short() {
            false if self.has_windows && self.want().is_some_and(|want| want > self.share) => SCARCE_KEPT,
            _ if self.has_windows => WINDOW_KEPT,
            true => SHORT_KEPT,
            false => KEPT,
        };
        let fresh = Tokens::for_rate(self.share, self.is_short());
        match self.sent.as_ref().and_then(Sent::tokens) {
            Some(current) if kept.contains(&(fresh.rate() / current.rate())) => current,
            Some(current) => fresh.distinct_from(current),
            None => fresh,
        }
    }

    /// Returns what would be sent, with what may have been admitted since the last report.
    fn proposal(&self, tokens: Tokens, ttl: TimeDelta, now: Timestamp) -> Exposed<'_> {
        let (past, settled) = (&self.past, self.settled);
        let (assignment, expires) = (Assignment::Tokens(tokens), now + plus(ttl, GUARD));
        let until = |expires| self.covered_until(expires, now);
        match self.sent {
            // An unchanged bucket is not refilled; only its time is extended. If it may have expired before this arrives,
            // the client starts a new one.
            Some(sent) if sent.assignment == assignment && now + GUARD < sent.lasts => {
                let sent = Sent { expires: expires.max(sent.expires), lasts: now + ttl, ttl, ..sent };
                Exposed { sent, past, replaces: None, settled, until: until(sent.expires) }
            }
            replaces => {
                let replaced = now + plus(GUARD, GUARD);
                let residue = replaces.map_or(0, |sent| sent.residue_at(now));
                let sent = Sent {
                    assignment,
                    started: now,
                    expires,
                    lasts: now + ttl,
                    ttl,
                    residue,
                    replaced,
                    level: None,
                };
                Exposed { sent, past, replaces, settled, until: until(expires) }
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

    /// Returns the target as it would be sent; `None` if the limits are not known.
    pub(super) fn wanted(&self, now: Timestamp) -> Option<Exposed<'_>> {
        self.terms.map(|terms| self.proposal(self.target(), self.ttl(terms), now))
    }

    /// Returns the smallest assignment as it would be sent.
    pub(super) fn least(&self, now: Timestamp) -> Exposed<'_> {
        self.proposal(self.bucket(0.0), TimeDelta::from_secs(1), now)
    }

    /// Returns a bucket for this rate that Envoy sees as a change of the current one if it is one.
    fn bucket(&self, rate: f64) -> Tokens {
        let (fresh, old) =
            (Tokens::for_rate(rate, self.is_short()), self.sent.as_ref().and_then(Sent::tokens));
        old.map_or(fresh, |old| fresh.distinct_from(old))
    }

    /// Records that so many requests were paid that were admitted without an assignment.
    pub(super) const fn pay(&mut self, units: u64) {
        self.uncharged = self.uncharged.saturating_sub(units);
        self.tries = 0;
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
        let sent =
            Sent { assignment, started: now, expires, lasts: now + ttl, ttl, residue, replaced, level: None };
        self.send(sent, self.sent);
        if assignment == Assignment::AllowAll {
            self.forgive();
        }
        (self.has_news, self.retry_at) = (false, retry_at);
        (assignment, BLANKET_TTL)
    }

    /// Returns whether the current assignment is the target and needs only the units that were just charged: where the cover
    /// lasts until the next pass, not every charge has to be sent.
    fn suffices(&self, terms: Terms, fits: &impl Fn(&Exposed<'_>) -> bool, now: Timestamp) -> bool {
        self.sent.is_some_and(|sent| {
            terms.cover == Cover::NextPass
                && sent.tokens() == Some(self.target())
                && !sent.is_late(terms.cover, now)
                && self.exposed(now).is_some_and(|of| fits(&of))
        })
    }

    /// Assigns the largest part of the target that the units suffice for, and returns it with its time to live in seconds.
    /// `None` if nothing is to be sent: the current assignment lasts. `ends` is the next end of a window.
    pub(super) fn assign(
        &mut self,
        fits: impl Fn(&Exposed<'_>) -> bool,
        ends: Option<Timestamp>,
        now: Timestamp,
    ) -> Option<(Assignment, u64)> {
        let terms = self.terms?;
        self.has_news = false;
        if self.suffices(terms, &fits, now) {
            return None;
        }
        let target = self.target();
        let mut best: Option<(Tokens, TimeDelta)> = None;
        let ttl = self.ttl(terms);
        for ttl in [ttl, TimeDelta::from_micros(ttl.as_micros() / 3), TimeDelta::from_secs(1)] {
            let ttl = TimeDelta::from_secs((ttl.as_micros() / 1_000_000).max(1));
            let found = self.largest(target, ttl, &fits, now);
            if found.is_some_and(|found| best.is_none_or(|(best, _)| found.rate() > best.rate() * 1.5)) {
                best = found.map(|found| (found, ttl));
            }
        }
        let Some((tokens, ttl)) = best else {
            let lasts = self.sent.is_some_and(|sent| match sent.assignment {
                Assignment::Tokens(_) => {
                    now + PASS + GUARD < sent.expires && self.exposed(now).is_some_and(|of| fits(&of))
                }
                Assignment::DenyAll => now + BLANKET_RENEWED < sent.lasts,
                Assignment::AllowAll => false,
            });
            let pause = match terms.cover {
                Cover::Expiry => TimeDelta::from_secs(1),
                Cover::NextPass => SHORT_PASS,
            };
            // A window that has ended has all its units again.
            let retry_at = ends.into_iter().fold(now + pause, Timestamp::min);
            self.retry_at = retry_at;
            return (!lasts).then(|| self.assign_blanket(Assignment::DenyAll, retry_at, now));
        };
        let Exposed { sent, replaces, .. } = self.proposal(tokens, ttl, now);
        self.send(sent, replaces);
        Some((sent.assignment, ttl.as_micros() / 1_000_000))
    }

    /// Returns the fastest bucket up to `target` that the units suffice for.
    fn largest(
        &self,
        target: Tokens,
        ttl: TimeDelta,
        fits: &impl Fn(&Exposed<'_>) -> bool,
        now: Timestamp,
    ) -> Option<Tokens> {
        let fits = |tokens: &Tokens| fits(&self.proposal(*tokens, ttl, now));
        if fits(&target) {
            return Some(target);
        }
        let current = self.sent.as_ref().and_then(Sent::tokens);
        let is_near = |current: &Tokens| NEAR.contains(&(current.rate() / target.rate()));
        if let Some(current) = current.filter(is_near).filter(fits) {
            return Some(current);
        }
        let slowest = Some(self.bucket(0.0)).filter(fits)?;
        let (mut low, mut high) = (slowest, target.rate());
        let mut step = high / 2.0;
        high = step;
        for _ in 0..8 {
            let tokens = self.bucket(high);
            step /= 2.0;
            if fits(&tokens) {
                low = tokens;
                high += step;
            } else {
                high -= step;
            }
        }
        Some(low)
    }
}
