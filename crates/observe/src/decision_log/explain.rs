//! A decision in words: one sentence, and the whole story.

use super::record::{DecisionRecord, LimitDetail, NodeInfo, rfc3339};
use crate::decision_log::cache::LimitDescription;
use crate::recorder::capture::LoggedVerdict;
use std::fmt::Write;
use tollgate_core::TimeDelta;
use tollgate_engine::{INLINE_LIMIT, MeasureAction, Origin};
use tollgate_rules::Role;

impl DecisionRecord {
    /// What it is owed to, in words.
    fn rule_text(&self) -> String {
        match self.rule() {
            Some(INLINE_LIMIT) => "the request's inline limit".to_owned(),
            Some(rule) => format!("rule `{rule}`"),
            None => "no rule".to_owned(),
        }
    }

    /// Why something passed that a limit was over for.
    fn shadow_text(&self) -> String {
        let (by, role) = (self.rule_text(), self.limit.as_ref().map(|told| told.role));
        match (role, &self.measure) {
            (Some(Role::Shadow), _) => format!("Allowed; {by} is in shadow and would have denied it"),
            (Some(Role::Candidate), _) => {
                format!("Allowed; the number that is tried for {by} would have denied it")
            }
            (_, Some((measure, MeasureAction::ShadowAll))) => {
                format!(
                    "Allowed: `{measure}`, a measure of an operator, had put everything in shadow; {by} would have denied it"
                )
            }
            _ if self.revision.is_none() => {
                format!("Allowed: everything was let pass; {by} would have denied it")
            }
            _ => format!(
                "Allowed: the whole server was in shadow (`global_shadow`); {by} would have denied it"
            ),
        }
    }

    /// The verdict and its cause, without the numbers, which [`Self::json`] has as fields.
    #[must_use]
    pub fn headline(&self) -> String {
        let by = self.rule_text();
        let measure = self.measure.as_ref().map_or("emergency", |(measure, _)| measure);
        match (self.verdict, self.origin) {
            (LoggedVerdict::Deny, Origin::FailClosed) => {
                format!("Denied: the store was away, and {by} turns requests away then")
            }
            (LoggedVerdict::Deny, Origin::Emergency) => {
                format!("Denied by `{measure}`, a measure of an operator")
            }
            (_, Origin::Emergency) => format!("Allowed by `{measure}`, a measure of an operator"),
            (LoggedVerdict::Allow, Origin::Grant) => {
                format!("Allowed by {by} out of extra quota that was granted")
            }
            (LoggedVerdict::Deny, _) => format!("Denied by {by}"),
            (LoggedVerdict::ShadowDeny, _) => self.shadow_text(),
            (_, Origin::FailOpen) => {
                "Allowed: the store was away, and the rules let requests pass then".to_owned()
            }
            (_, Origin::Unmatched) => "Allowed: no limit applies".to_owned(),
            (LoggedVerdict::Delay, _) => format!("Allowed by {by}, after a wait of {}", humanize(self.delay)),
            (LoggedVerdict::Degrade, _) => format!("Allowed, to be served in a lesser way by {by}"),
            (LoggedVerdict::Allow, _) => format!("Allowed; nearest to its limit was {by}"),
        }
    }

    /// What neither the headline nor the fields tell: a measure that was active, and what decided in place of the store.
    #[must_use]
    pub fn notes(&self) -> Vec<String> {
        let measure = self.measure_line();
        let decided = match self.origin {
            Origin::Local => {
                Some("The store was unavailable; this node's fallback counters decided.".to_owned())
            }
            _ => None,
        };
        measure.into_iter().chain(decided).collect()
    }

    /// One sentence.
    #[must_use]
    pub fn summary(&self) -> String {
        let mut summary = self.headline();
        if let Some(told) = self.limit.as_ref().filter(|_| self.origin != Origin::FailClosed) {
            let _ = write!(
                summary,
                ": {} of {} units were in use ({})",
                told.used_before, told.limit.capacity, told.limit
            );
            if told.is_granted {
                let _ = write!(summary, "; {} of the extra quota were left", told.remaining);
            }
        }
        match (self.verdict, self.retry_after) {
            // Callers are told when to try again; nobody knows when it will help.
            (LoggedVerdict::Deny, _) if self.origin == Origin::FailClosed => {
                summary.push_str("; the same request passes once the store is back, if its limits have room");
            }
            (LoggedVerdict::Deny, Some(wait)) if self.is_concurrency() => {
                let wait = humanize(wait);
                let _ = write!(
                    summary,
                    "; it would have passed as soon as one of them had ended, {wait} later at the latest"
                );
            }
            (LoggedVerdict::Deny, Some(wait)) => {
                let _ = write!(summary, "; the same request would have passed {} later", humanize(wait));
            }
            (LoggedVerdict::Deny, None) => {
                summary.push_str("; it asks for more than the limit ever has, and can never pass");
            }
            _ => {}
        }
        summary.push('.');
        summary
    }

    /// The measure that was active, where it did not decide by itself.
    fn measure_line(&self) -> Option<String> {
        let (measure, act) = self.measure.as_ref().filter(|_| self.origin != Origin::Emergency)?;
        let did = match act {
            MeasureAction::Tighten(thousandths) => {
                let percent = f64::from(*thousandths) / 10.0;
                format!(": limits were {percent}% of what the rules say")
            }
            MeasureAction::ShadowAll => ": nothing was denied".to_owned(),
            MeasureAction::DisableRule => ": a rule was switched off".to_owned(),
            MeasureAction::Block | MeasureAction::Exempt | MeasureAction::AllowAll => String::new(),
        };
        Some(format!("An operator's measure `{measure}` was on{did}."))
    }

    /// Whether it waits for others to end, and not for a time.
    fn is_concurrency(&self) -> bool {
        self.limit.as_ref().is_some_and(|told| told.limit.is_concurrency())
    }

    /// The whole story, line by line, and when the same request would have passed, where that is known.
    #[must_use]
    pub fn explanation(&self, place: &NodeInfo) -> (Vec<String>, Option<String>) {
        let mut lines = vec![self.summary()];
        let who: Vec<String> =
            self.caller.attributes.iter().map(|(name, value)| format!("{name}={value}")).collect();
        let asked = if self.protocol.is_empty() { "the program itself" } else { self.protocol };
        lines.push(format!(
            "Asked at {} through {asked} in the domain `{}`, at a cost of {}: {}.",
            rfc3339(self.at),
            self.caller.domain,
            self.cost,
            if who.is_empty() { "no attributes".to_owned() } else { who.join(", ") }
        ));
        if let Some(LimitDetail { limit, used_before, remaining, is_granted, .. }) = &self.limit {
            let of = if *is_granted { " of the extra quota" } else { "" };
            lines.push(format!(
                "The limit of {} was {limit} then; its counter stood at {used_before} before this request and {remaining}{of} were left.",
                self.rule_text()
            ));
        }
        lines.extend(self.measure_line());
        let decided = match self.origin {
            Origin::Store => "the counters decided",
            Origin::Local => "the store was away, and this node's own counters decided",
            Origin::FailOpen | Origin::FailClosed => "the store was away, and the rule's `on_error` decided",
            Origin::Unmatched => "no rule with a limit matched",
            Origin::Grant => "extra quota that was granted to the caller decided",
            Origin::Emergency => "an emergency measure of an operator decided",
        };
        lines.push(match &self.revision {
            Some(revision) => format!("Rules {revision} on node {}: {decided}.", place.node),
            None => format!("The limit came with the call, on node {}: {decided}.", place.node),
        });
        let is_known = self.verdict == LoggedVerdict::Deny && self.origin != Origin::FailClosed;
        let passes = self.retry_after.filter(|_| is_known).map(|wait| rfc3339(self.at + wait));
        if let Some(at) = &passes {
            lines.push(match self.origin {
                Origin::Emergency => format!("The same request would have passed at {at}, when the measure ends."),
                _ if self.is_concurrency() => format!(
                    "The same request would have passed as soon as one of those under way had ended, at the latest at {at}, if nobody else had taken its place."
                ),
                _ => format!("The same request would have passed at {at}, if nobody else had taken the units."),
            });
        }
        (lines, passes.filter(|_| !self.is_concurrency()))
    }
}

impl LimitDescription {
    /// Whether it is about what is under way at once.
    fn is_concurrency(&self) -> bool {
        self.window == "concurrent"
    }
}

impl std::fmt::Display for LimitDescription {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.window.as_str() {
            "concurrent" => write!(f, "{} at once", self.limit)?,
            window => write!(f, "{} per {window}", self.limit)?,
        }
        if self.capacity != self.limit {
            write!(f, ", burst {}", self.capacity)?;
        }
        write!(f, ", {}", self.algorithm)
    }
}

/// A wait as people say it: two units at most, and never more digits than anybody would wait by. Never less than it is.
fn humanize(span: TimeDelta) -> String {
    let micros = span.as_micros();
    if micros < 1_000 {
        return format!("{micros} µs");
    }
    if micros < 1_000_000 {
        return format!("{} ms", span.ceil_millis());
    }
    // In tenths of a second below a minute, in seconds above.
    let tenths = micros.div_ceil(100_000);
    if tenths < 600 {
        return if tenths.is_multiple_of(10) {
            format!("{} s", tenths / 10)
        } else {
            format!("{}.{} s", tenths / 10, tenths % 10)
        };
    }
    let seconds = span.ceil_secs();
    let (large, small, one, per) = match seconds {
        0..3_600 => ("min", "s", 1, 60),
        3_600..86_400 => ("h", "min", 60, 60),
        _ => ("d", "h", 3_600, 24),
    };
    // So many of the smaller unit, rounded up.
    let count = seconds.div_ceil(one);
    match (count / per, count % per) {
        (whole, 0) => format!("{whole} {large}"),
        (whole, rest) => format!("{whole} {large} {rest} {small}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whoever waits as long as they are told must not come too early, and can say the number aloud.
    #[test]
    fn durations_are_humanized() {
        for (micros, told) in [
            (0, "0 µs"),
            (730, "730 µs"),
            (1_001, "2 ms"),
            (250_000, "250 ms"),
            (999_001, "1000 ms"),
            (1_000_000, "1 s"),
            (11_884_396, "11.9 s"),
            (59_900_001, "1 min"),
            (1_199_900_000, "20 min"),
            (1_183_000_001, "19 min 44 s"),
            (5_400_000_000, "1 h 30 min"),
            (86_399_000_000, "24 h"),
            (90_000_000_000, "1 d 1 h"),
            (2_592_000_000_000, "30 d"),
        ] {
            assert_eq!(humanize(TimeDelta::from_micros(micros)), told, "{micros}");
        }
    }
}
