//! Assignments that were sent, how long they last, and the most that a client may still admit by them. Pure.
//!
//! An assignment lasts from one report to the next where the burst allows it, so that one is sent per report while demand is
//! steady. The longer it lasts, the more of the burst it takes: units must be charged whose slots begin after its end, so all
//! slots before are taken, by this stream or by others. Rejected: renewing at a third of the time to live whatever it is, which
//! sent three to five per report.

use super::assignment::{Assignment, Tokens};
use tollgate_core::{TimeDelta, Timestamp};
use tollgate_engine::{AheadKind, CounterAhead};

/// Time that an assignment may take to its client, and a report to the server.
pub(super) const GUARD: TimeDelta = TimeDelta::from_millis(100);
/// Longest time between two passes over the accounts.
pub(super) const PASS: TimeDelta = TimeDelta::from_millis(500);
/// The same while any account is covered until the next pass only. Charges of a pass are blocks of slots, and the shorter
/// they are, the more evenly the slots of several streams are mixed.
pub(super) const SHORT_PASS: TimeDelta = TimeDelta::from_millis(200);
/// Longest time to live in seconds: three of Envoy's report intervals. A restart of the server within ten seconds is
/// bridged; the price is that a share that a stream no longer needs stays in escrow for as long if the stream is lost.
const MAX_TTL: u64 = 15;
/// An assignment may last for this part of the time in which a bucket fills, so that three quarters of a burst stay
/// available to others.
const PART_OF_BURST: u64 = 4;
/// Time to live in seconds of limits with less burst: from one of Envoy's reports until the assignment after the next.
const REPORT_TTL: u64 = 6;
/// The part of a burst that this may take, in eighths. More would leave too little for a demand that moves to another stream.
const EIGHTHS_OF_BURST: u64 = 5;
/// The part where it is not enough for that, in eighths.
const EIGHTHS_OF_LESS: u64 = 4;
/// Envoy's report interval, and time for the pass after a report: an assignment that lasts longer is renewed by reports.
const REPORTED: TimeDelta = TimeDelta::from_millis(5_200);
/// A report renews an assignment that was renewed this long ago. Reports more often than that change shares only. Where a renewal
/// came late, the next reports find it too young until it is renewed with them again: the shorter this is, the sooner.
const RENEWED: TimeDelta = TimeDelta::from_secs(1);

pub(super) const fn plus(a: TimeDelta, b: TimeDelta) -> TimeDelta {
    TimeDelta::from_micros(a.as_micros().saturating_add(b.as_micros()))
}

/// For how long the escrow must suffice without another charge.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Cover {
    /// Until the assignment has expired.
    Expiry,
    /// Until what the next pass sends has taken effect: the pass may be late by [`GUARD`], and a changed assignment takes
    /// twice that (see [`Sent::residue_at`]).
    NextPass,
}

pub(super) const UNTIL_NEXT_PASS: TimeDelta =
    TimeDelta::from_micros(SHORT_PASS.as_micros() + 3 * GUARD.as_micros());

/// What the limits of a bucket allow its assignments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Terms {
    /// Time to live.
    pub(super) ttl: TimeDelta,
    /// The same until demand is known, with the next report: what may be wrong by far must not take most of the limit.
    pub(super) first_ttl: TimeDelta,
    pub(super) cover: Cover,
}

impl Terms {
    /// Returns the terms for the limits that a bucket matched.
    pub(super) fn new(counters: &[CounterAhead]) -> Self {
        let slots = counters.iter().filter(|counter| counter.kind == AheadKind::Slots);
        // Time in which the bucket fills.
        let reach = slots
            .map(|counter| {
                u128::from(counter.period.as_micros()) * u128::from(counter.capacity)
                    / u128::from(counter.count.max(1))
            })
            .min()
            .map_or(u64::MAX, |micros| u64::try_from(micros).unwrap_or(u64::MAX));
        // A window is charged when it begins, so an assignment that the server cannot renew must not last for several.
        let window = counters.iter().filter_map(|counter| counter.window).min();
        let window = window.map_or(u64::MAX, TimeDelta::as_micros);
        let eighths = |count: u64| (reach.saturating_mul(count) / 8).saturating_sub(GUARD.as_micros());
        let report = REPORT_TTL * 1_000_000;
        let longer =
            if eighths(EIGHTHS_OF_BURST) >= report { report } else { eighths(EIGHTHS_OF_LESS).min(report) };
        let part = reach / PART_OF_BURST;
        let seconds = |micros: u64| TimeDelta::from_secs((micros.min(window) / 1_000_000).clamp(1, MAX_TTL));
        let is_short = Self::is_short(TimeDelta::from_micros(reach.min(window)));
        let cover = if is_short { Cover::NextPass } else { Cover::Expiry };
        let ttl = seconds(part.max(longer));
        Self { ttl, first_ttl: seconds(part.min(report)), cover }
    }

    /// Returns whether a limit alone, which fills in this time, leaves room for a cover until the next pass only.
    pub(super) fn is_short(reach: TimeDelta) -> bool {
        reach < TimeDelta::from_micros(2 * (1_000_000 + GUARD.as_micros()))
    }

    /// Returns the end of the cover of an assignment that expires then.
    pub(super) fn covered_until(self, expires: Timestamp, now: Timestamp) -> Timestamp {
        match self.cover {
            Cover::Expiry => expires,
            Cover::NextPass => expires.min(now + UNTIL_NEXT_PASS),
        }
    }
}

/// An assignment that was sent.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sent {
    pub(super) assignment: Assignment,
    /// Instant at which it was sent first.
    pub(super) started: Timestamp,
    /// Latest instant at which the client may still use it.
    pub(super) expires: Timestamp,
    /// Earliest instant at which it may expire at the client.
    pub(super) lasts: Timestamp,
    /// Time to live as sent.
    pub(super) ttl: TimeDelta,
    /// Most that the client may still admit by the assignment before this one, until `replaced`.
    pub(super) residue: u64,
    /// Latest instant at which this assignment takes effect.
    pub(super) replaced: Timestamp,
    /// Most tokens that the client's bucket may have had, and when: what was reported as admitted is not in it.
    pub(super) level: Option<(u64, Timestamp)>,
}

impl Sent {
    pub(super) fn tokens(&self) -> Option<Tokens> {
        match self.assignment {
            Assignment::Tokens(tokens) => Some(tokens),
            Assignment::AllowAll | Assignment::DenyAll => None,
        }
    }

    /// Returns whether the assignment must be renewed now.
    pub(super) fn is_late(&self, cover: Cover, now: Timestamp) -> bool {
        self.late_at(cover) <= now
    }

    /// Returns when the assignment must be renewed: before it expires at the client, whether a report comes or not.
    pub(super) fn late_at(&self, cover: Cover) -> Timestamp {
        let least = match cover {
            Cover::Expiry => plus(PASS, plus(GUARD, plus(GUARD, GUARD))),
            Cover::NextPass => UNTIL_NEXT_PASS,
        };
        let after_report = self.ttl.as_micros().saturating_sub(REPORTED.as_micros());
        let left = (self.ttl.as_micros() / 3).min(after_report).max(least.as_micros());
        self.expires - TimeDelta::from_micros(left)
    }

    /// Returns whether a report renews the assignment.
    pub(super) fn is_renewable(&self, now: Timestamp) -> bool {
        plus(self.lasts.since(now), RENEWED) <= self.ttl
    }

    /// Returns the most that the client may admit by this assignment from `since` until `until`.
    pub(super) fn own(&self, since: Timestamp, until: Timestamp) -> u64 {
        let (since, until) = (since.max(self.started), until.min(self.expires));
        self.tokens().filter(|_| since < until).map_or(0, |tokens| {
            let full = tokens.exposure(until.since(since));
            let level = self.level.filter(|(_, at)| *at <= since);
            level.map_or(full, |(left, at)| full.min(left.saturating_add(tokens.whole_gain(until.since(at)))))
        })
    }

    /// Records that the client has reported `units` since its last report, which was written at `settled`; this one was at
    /// `read`. A bucket that was not there all the time may be full.
    pub(super) fn report(&mut self, units: u64, settled: Timestamp, read: Timestamp) {
        let Some(tokens) = self.tokens() else { return };
        self.level = (self.replaced <= settled).then(|| {
            let (left, at) = self.level.unwrap_or((u64::from(tokens.max), settled));
            (left.saturating_add(tokens.gain(read.since(at))).saturating_sub(units), read)
        });
    }

    /// Returns the tokens that it gains from `since` until `until`.
    pub(super) fn gain(&self, since: Timestamp, until: Timestamp) -> u64 {
        let (since, until) = (since.max(self.started), until.min(self.expires));
        self.tokens().filter(|_| since < until).map_or(0, |tokens| tokens.gain(until.since(since)))
    }

    /// Returns the whole tokens that it gains from `since` until `until`, if it is in effect.
    pub(super) fn whole_gain(&self, since: Timestamp, until: Timestamp) -> u64 {
        let (since, until) = (since.max(self.started), until.min(self.expires));
        self.tokens().filter(|_| since < until).map_or(0, |tokens| tokens.whole_gain(until.since(since)))
    }

    /// Returns the most that the client may still admit by this assignment and the one before when another is sent at
    /// `now`.
    pub(super) fn residue_at(&self, now: Timestamp) -> u64 {
        let before = if now < self.replaced { self.residue } else { 0 };
        before + self.own(now, now + plus(GUARD, GUARD))
    }

    /// Returns when nothing can be admitted anymore, by this assignment and the one before.
    pub(super) fn spent_at(&self) -> Timestamp {
        let residue = if self.residue > 0 { self.replaced } else { self.started };
        self.tokens().map_or(residue, |_| residue.max(self.expires))
    }

    /// Returns the most that the client may admit from `at` on.
    pub(super) fn exposure(&self, at: Timestamp) -> u64 {
        self.exposure_until(self.expires, at)
    }

    /// Returns the most that the client may admit from `at` until `until`.
    pub(super) fn exposure_until(&self, until: Timestamp, at: Timestamp) -> u64 {
        let residue = if at < self.replaced { self.residue } else { 0 };
        let own = self.tokens().filter(|_| at < self.expires);
        // From `at`, not from `started`: a report may have been written before.
        residue + own.map_or(0, |tokens| tokens.exposure(self.expires.min(until).since(at)))
    }
}
