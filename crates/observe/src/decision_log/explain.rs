//! Decision explanations: a headline, a one-sentence summary and a full explanation of a decision record.

use super::record::{DecisionRecord, LimitDetail, NodeInfo, rfc3339};
use crate::decision_log::cache::LimitDescription;
use crate::recorder::capture::LoggedVerdict;
use std::fmt::Write;
use tollgate_core::TimeDelta;
use tollgate_engine::{INLINE_LIMIT, MeasureAction, Origin};
use tollgate_rules::Role;

impl DecisionRecord {
    /// Returns the rule or inline limit that the decision is attributed to, as text.
    fn rule_text(&self) -> String {
        match self.rule() {
            Some(INLINE_LIMIT) => "the request's inline limit".to_owned(),
            Some(rule) => format!("rule `{rule}`"),
            None => "no rule".to_owned(),
        }
    }

    /// Returns why the counters have not decided, and from when on they do.
    fn without_counters(&self) -> (&'static str, &'static str) {
        let is_elsewhere =
            self.region.as_deref().is_some_and(|region| region.mode.has_owner() && !region.is_own);
        match (self.is_check_shed, is_elsewhere) {
            (true, _) => ("the store was not asked", "checks are no longer shed"),
            (false, true) => ("the cell that decides the limit did not answer", "that cell answers again"),
            (false, false) => ("the store was unavailable", "the store is available again"),
        }
    }

    /// Returns why a request passed although a limit was exceeded.
    fn shadow_text(&self) -> String {
        let (by, role) = (self.rule_text(), self.limit.as_ref().map(|detail| detail.role));
        match (role, &self.measure) {
            (Some(Role::Shadow), _) => format!("Allowed; {by} is in shadow mode and would have denied it"),
            (Some(Role::Unenforced), _) => {
                format!(
                    "Allowed; {by} is not enforced for this caller yet (`enforce`) and would have denied it"
                )
            }
            (Some(Role::Candidate), _) => {
                format!("Allowed; the candidate limit of {by} would have denied it")
            }
            (_, Some((measure, MeasureAction::ShadowAll))) => {
                format!(
                    "Allowed: emergency measure `{measure}` put all rules in shadow mode; {by} would have denied it"
                )
            }
            _ if self.revision.is_none() => {
                format!("Allowed: limits were not enforced; {by} would have denied it")
            }
            _ => format!("Allowed: global shadow mode was on (`global_shadow`); {by} would have denied it"),
        }
    }

    /// Returns the verdict and its cause, without the numbers, which [`Self::json`] has as fields.
    #[must_use]
    pub fn headline(&self) -> String {
        let by = self.rule_text();
        let measure = self.measure.as_ref().map_or("emergency", |(measure, _)| measure);
        match (self.verdict, self.origin) {
            (LoggedVerdict::Deny, Origin::FailClosed) => {
                format!("Denied: {} and {by} fails closed", self.without_counters().0)
            }
            (LoggedVerdict::Deny, Origin::Emergency) => {
                format!("Denied by emergency measure `{measure}`")
            }
            (_, Origin::Emergency) => format!("Allowed by emergency measure `{measure}`"),
            (LoggedVerdict::Allow, Origin::Grant) => {
                format!("Allowed by a grant over the limit of {by}")
            }
            (LoggedVerdict::Allow, Origin::Overload) => "Allowed after its delay".to_owned(),
            (LoggedVerdict::Deny, _) => format!("Denied by {by}"),
            (LoggedVerdict::ShadowDeny, _) => self.shadow_text(),
            (_, Origin::FailOpen) => {
                format!("Allowed: {} and the rules fail open", self.without_counters().0)
            }
            (_, Origin::Shed) => "Allowed by `on_error`, without the store".to_owned(),
            (_, Origin::Unmatched) => "Allowed: no limit applies".to_owned(),
            (LoggedVerdict::Delay, _) => format!("Allowed by {by} after a delay of {}", humanize(self.delay)),
            (LoggedVerdict::Degrade, _) => format!("Allowed with degraded service by {by}"),
            (LoggedVerdict::Warn, _) => format!("Allowed with a warning: over the soft limit of {by}"),
            (LoggedVerdict::Allow, _) => format!("Allowed; {by} was closest to its limit"),
        }
    }

    /// Returns what neither the headline nor the fields contain: an active measure, and what decided instead of the store.
    #[must_use]
    pub fn notes(&self) -> Vec<String> {
        let measure = self.measure_line();
        let decided = match self.origin {
            Origin::Regional => {
                Some("Other cells were silent; this cell's part of the limit decided.".to_owned())
            }
            Origin::Local => {
                let (why, _) = self.without_counters();
                Some(format!(
                    "This node's fallback counters decided by its share of the limit, because {why}."
                ))
            }
            _ => None,
        };
        measure.into_iter().chain(decided).chain(self.region_line()).collect()
    }

    /// Returns the explanation in one sentence.
    #[must_use]
    pub fn summary(&self) -> String {
        let mut summary = self.cause();
        self.write_retry(&mut summary);
        summary.push('.');
        summary
    }

    /// Returns the headline with the usage of the limit.
    fn cause(&self) -> String {
        let mut cause = self.headline();
        if let Some(reason) = &self.reason {
            let _ = write!(cause, ": {reason}");
        }
        let counted = self.limit.as_ref().filter(|_| self.origin != Origin::FailClosed);
        if let Some((detail, until)) = counted.and_then(|detail| Some((detail, detail.assumed_until?))) {
            let _ = write!(
                cause,
                ": the store may have lost what was used, so all {} {} count as used, until {} ({})",
                detail.limit.capacity,
                detail.limit.units(),
                rfc3339(until),
                detail.limit
            );
        } else if let Some(detail) = counted {
            let _ = write!(
                cause,
                ": {} of {} {} were in use ({})",
                detail.used_before,
                detail.limit.capacity,
                detail.limit.units(),
                detail.limit
            );
            if detail.is_granted {
                let _ = write!(cause, "; {} left in the grant", detail.remaining);
            }
        }
        cause
    }

    /// Appends when the same request passes.
    fn write_retry(&self, summary: &mut String) {
        match (self.verdict, self.retry_after) {
            // A fail-closed denial has a retry-after, but when the store recovers is unknown.
            (LoggedVerdict::Deny, _) if self.origin == Origin::FailClosed => {
                let (_, then) = self.without_counters();
                let _ = write!(summary, "; the same request passes once {then}, if its limits have room");
            }
            (LoggedVerdict::Deny, Some(wait)) if self.origin == Origin::Overload => {
                let _ = write!(summary, "; the client was told to retry after {}", humanize(wait));
            }
            (LoggedVerdict::Deny, Some(wait)) if self.is_concurrency() => {
                let wait = humanize(wait);
                let _ = write!(
                    summary,
                    "; the same request would have passed when one of them completed, at most {wait} later"
                );
            }
            (LoggedVerdict::Deny, Some(wait)) => {
                let _ = write!(summary, "; the same request would have passed {} later", humanize(wait));
            }
            (LoggedVerdict::Deny, None) => {
                summary.push_str("; its cost exceeds the limit's capacity, so it can never pass");
            }
            _ => {}
        }
    }

    /// Returns a sentence about the active measure, unless the measure itself decided.
    fn measure_line(&self) -> Option<String> {
        let (measure, act) = self.measure.as_ref().filter(|_| self.origin != Origin::Emergency)?;
        let did = match act {
            MeasureAction::Tighten(thousandths) => {
                let percent = f64::from(*thousandths) / 10.0;
                format!(": limits were {percent}% of the rules' values")
            }
            MeasureAction::ShadowAll => ": all rules were in shadow mode".to_owned(),
            MeasureAction::DisableRule => ": a rule was disabled".to_owned(),
            MeasureAction::Block | MeasureAction::Exempt | MeasureAction::AllowAll => String::new(),
        };
        Some(format!("Emergency measure `{measure}` was active{did}."))
    }

    /// Returns a sentence about how cells shared the limit, where there are several.
    fn region_line(&self) -> Option<String> {
        let region = self.region.as_deref()?;
        let (mode, lag) = (region.mode.name(), region.lag.ceil_millis());
        if let Some(part) = region.part {
            let others = region.others.unwrap_or(0);
            return Some(format!(
                "Cells share the limit (`region: {mode}`): other cells were silent, so this cell decided by its part of it, \
                 {part} units; other cells had reported {others} used units."
            ));
        }
        Some(match (&region.owner, region.others) {
            (_, Some(others)) => format!(
                "Cells share the limit (`region: {mode}`): other cells had reported {others} used units, and the lag was {lag} ms."
            ),
            (Some(owner), _) => {
                let which = if region.is_own { ", this cell" } else { "" };
                format!(
                    "A cell of region `{owner}`{which} decides the limit (`region: {mode}`); the lag between cells was {lag} ms."
                )
            }
            (None, _) if region.mode.has_owner() => {
                format!("No cell could be determined that decides the limit (`region: {mode}`).")
            }
            (None, _) => format!("This cell decides its part of the limit alone (`region: {mode}`)."),
        })
    }

    /// Returns whether the limit is a concurrency limit, which frees units on completion and not over time.
    fn is_concurrency(&self) -> bool {
        self.limit.as_ref().is_some_and(|detail| detail.limit.is_concurrency())
    }

    /// Returns the full explanation, one sentence per line, and when the same request would have passed, if known.
    #[must_use]
    pub fn explanation(&self, node: &NodeInfo) -> (Vec<String>, Option<String>) {
        let is_known = self.verdict == LoggedVerdict::Deny
            && !matches!(self.origin, Origin::FailClosed | Origin::Overload);
        let passes = self.retry_after.filter(|_| is_known).map(|wait| rfc3339(self.at + wait));
        // The last line has the time at which it passes; nothing is repeated.
        let mut first = self.cause();
        if passes.is_none() {
            self.write_retry(&mut first);
        }
        let mut lines = vec![format!("{first}.")];
        let attributes: Vec<String> =
            self.caller.attributes.iter().map(|(name, value)| format!("{name}={value}")).collect();
        let protocol = if self.protocol.is_empty() { "an in-process call" } else { self.protocol };
        lines.push(format!(
            "Received at {} via {protocol} in domain `{}` with cost {}: {}.",
            rfc3339(self.at),
            self.caller.domain,
            self.cost,
            if attributes.is_empty() { "no attributes".to_owned() } else { attributes.join(", ") }
        ));
        if let Some(LimitDetail { limit, used_before, remaining, is_granted, .. }) = &self.limit {
            match self.origin {
                Origin::FailClosed => lines.push(format!(
                    "The limit of {} was {limit}; {used_before} {} were used before this request and {remaining} remained.",
                    self.rule_text(),
                    limit.units()
                )),
                _ if *is_granted => {}
                _ => lines.push(format!("{remaining} {} remained after it.", limit.units())),
            }
        }
        lines.extend(self.measure_line());
        lines.extend(self.region_line());
        let (without, _) = self.without_counters();
        let decided = match self.origin {
            Origin::Store => "decided by the counters",
            Origin::Regional => "other cells were silent, so this cell's part of the limit decided",
            Origin::Local => {
                &format!("{without}, so this node's fallback counters decided by its share of the limit")
            }
            Origin::Shed => "the store was not asked, so the rule's `on_error` decided",
            Origin::FailOpen | Origin::FailClosed => &format!("{without}, so the rule's `on_error` decided"),
            Origin::Unmatched => "no rule with a limit matched",
            Origin::Grant => "a grant to the caller covered the request",
            Origin::Emergency => "an emergency measure decided",
            Origin::Overload => "shed before the upstream, nothing was charged",
            other => other.name(),
        };
        lines.push(match &self.revision {
            Some(revision) => format!("Rules {revision} on node {}: {decided}.", node.node),
            None => format!("Inline limit from the request on node {}: {decided}.", node.node),
        });
        if let Some((at, wait)) = passes.as_ref().zip(self.retry_after.map(humanize)) {
            lines.push(match self.origin {
                Origin::Emergency => {
                    format!("The same request would have passed {wait} later, at {at}, when the measure expires.")
                }
                _ if self.is_concurrency() => format!(
                    "The same request would have passed when one of those in flight completed, at the latest at {at} ({wait} later), unless another request took the permit."
                ),
                _ => format!(
                    "The same request would have passed {wait} later, at {at}, unless other requests used the units first."
                ),
            });
        }
        (lines, passes.filter(|_| !self.is_concurrency()))
    }
}

impl LimitDescription {
    /// Returns whether this limits requests in flight.
    fn is_concurrency(&self) -> bool {
        self.window == "concurrent"
    }

    /// Returns the name of what it counts.
    fn units(&self) -> &str {
        self.unit.as_deref().unwrap_or("units")
    }
}

impl std::fmt::Display for LimitDescription {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.window.as_str() {
            "concurrent" => write!(f, "{} concurrent", self.limit)?,
            window => match &self.unit {
                Some(unit) => write!(f, "{} {unit} per {window}", self.limit)?,
                None => write!(f, "{} per {window}", self.limit)?,
            },
        }
        if self.capacity != self.limit {
            write!(f, ", burst {}", self.capacity)?;
        }
        write!(f, ", {}", self.algorithm)
    }
}

/// Formats a wait with at most two units, rounded up so that it is never shorter than `span`.
#[must_use]
pub fn humanize(span: TimeDelta) -> String {
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
    // Number of the smaller unit, rounded up.
    let count = seconds.div_ceil(one);
    match (count / per, count % per) {
        (whole, 0) => format!("{whole} {large}"),
        (whole, rest) => format!("{whole} {large} {rest} {small}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A caller that waits as long as stated must not retry too early.
    #[test]
    fn durations_are_humanized() {
        for (micros, text) in [
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
            assert_eq!(humanize(TimeDelta::from_micros(micros)), text, "{micros}");
        }
    }
}
