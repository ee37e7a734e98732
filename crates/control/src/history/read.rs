//! Reads history: a series in steps that suit its range, and the busiest callers and rules of a range.

use super::{COARSE, FRESH, HistoryOf, MINUTE};
use crate::control_plane::ControlPlane;
use crate::db::on;
use crate::error::ControlError;
use serde::Serialize;
use std::collections::BTreeMap;
use utoipa::ToSchema;

/// Steps that a series may have, in seconds: each a multiple of the one before, and of what is stored.
const STEPS: [i64; 8] = [MINUTE, 300, COARSE, 1_800, 3_600, 7_200, 21_600, 86_400];
/// A series has at most about this many steps.
const MAX_POINTS: i64 = 400;

/// A series in columns; a step that no node recorded is `null`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, ToSchema)]
pub struct HistorySeries {
    /// Start of each step, in seconds since the epoch.
    pub t: Vec<i64>,
    /// Requests allowed in each step.
    pub allow: Vec<Option<i64>>,
    /// Requests denied.
    pub deny: Vec<Option<i64>>,
    /// Requests that a shadow rule would have denied.
    pub shadow_deny: Vec<Option<i64>>,
    /// Requests allowed because the store failed.
    pub fail_open: Vec<Option<i64>>,
    /// Requests delayed.
    pub delayed: Vec<Option<i64>>,
    /// Requests that no limit applied to.
    pub unmatched: Vec<Option<i64>>,
    /// Median latency in microseconds: the highest of the minutes and nodes of a step.
    pub p50_us: Vec<Option<i64>>,
    /// The same of the 99th percentile.
    pub p99_us: Vec<Option<i64>>,
    /// The same of the 99.9th percentile.
    pub p999_us: Vec<Option<i64>>,
}

/// A caller or rule in a range.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, ToSchema)]
pub struct HistoryRank {
    /// The caller's id; absent for rules.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub key_id: Option<String>,
    /// The caller as lists show it; absent for rules.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub key_masked: Option<String>,
    /// The rule's domain; absent for callers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub domain: Option<String>,
    /// The rule; absent for callers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rule: Option<String>,
    /// Requests allowed, where they are counted: a caller's requests are not, rule by rule.
    pub allow: i64,
    /// Requests denied.
    pub deny: i64,
}

/// Sums of one step.
type SumRow = (i64, i64, i64, i64, i64, i64, i64, Option<i64>, Option<i64>, Option<i64>);

const SERIES: &str = "SELECT (at / $1) * $1 AS t, CAST(SUM(allow) AS BIGINT), CAST(SUM(deny) AS BIGINT), \
         CAST(SUM(shadow_deny) AS BIGINT), CAST(SUM(fail_open) AS BIGINT), CAST(SUM(delayed) AS BIGINT), \
         CAST(SUM(unmatched) AS BIGINT), MAX(p50_us), MAX(p99_us), MAX(p999_us)
     FROM history WHERE rule = $2 AND caller = $3 AND step IN (60, 600) AND at >= $4 AND at < $5
     GROUP BY t ORDER BY t";
const TOP_CALLERS: &str = "SELECT h.caller, COALESCE(MAX(n.name), ''), CAST(SUM(h.allow) AS BIGINT), \
         CAST(SUM(h.deny) AS BIGINT)
     FROM history h LEFT JOIN history_names n ON n.kind = 'caller' AND n.id = h.caller
     WHERE h.rule = $1 AND h.caller <> 0 AND h.step IN (60, 600) AND h.at >= $2 AND h.at < $3
     GROUP BY h.caller ORDER BY SUM(h.allow + h.deny) DESC, h.caller LIMIT $4";
const DENYING_RULES: &str = "SELECT COALESCE(MAX(n.domain), ''), COALESCE(MAX(n.name), ''), \
         CAST(SUM(h.allow) AS BIGINT), CAST(SUM(h.deny) AS BIGINT) AS denied
     FROM history h LEFT JOIN history_names n ON n.kind = 'rule' AND n.id = h.rule
     WHERE h.caller = $1 AND h.rule <> 0 AND h.step IN (60, 600) AND h.at >= $2 AND h.at < $3
     GROUP BY h.rule ORDER BY denied DESC, h.rule LIMIT $4";

/// Returns the step for a range: fine enough to be read, and no finer than what is stored of the oldest part.
#[must_use]
pub fn history_step(from: i64, to: i64, now: i64) -> i64 {
    // Compaction of the step at the boundary may be due.
    let least = if from < now - FRESH + COARSE { COARSE } else { MINUTE };
    let fits = |step: &&i64| **step >= least && (to - from) / **step <= MAX_POINTS;
    STEPS.iter().find(fits).copied().unwrap_or(STEPS[STEPS.len() - 1])
}

impl ControlPlane {
    /// Returns a series from `from` to `to` (exclusive) in steps of `step` seconds, summed over all nodes.
    ///
    /// # Errors
    /// [`ControlError`] if the database is unavailable.
    pub async fn history(
        &self,
        of: &HistoryOf,
        from: i64,
        to: i64,
        step: i64,
    ) -> Result<HistorySeries, ControlError> {
        let mut sums: BTreeMap<i64, Option<SumRow>> = BTreeMap::new();
        // The total has a row for every minute in which a node ran: elsewhere nothing is known.
        if *of != HistoryOf::All {
            for row in self.history_sums(&HistoryOf::All, from, to, step).await? {
                sums.insert(row.0, None);
            }
        }
        for row in self.history_sums(of, from, to, step).await? {
            sums.insert(row.0, Some(row));
        }
        let mut series = HistorySeries::default();
        let mut t = from - from.rem_euclid(step);
        while t < to {
            let known = sums.get(&t);
            let row = known.copied().flatten();
            let count = |count: fn(&SumRow) -> i64| known.map(|_| row.as_ref().map_or(0, count));
            series.t.push(t);
            series.allow.push(count(|row| row.1));
            series.deny.push(count(|row| row.2));
            series.shadow_deny.push(count(|row| row.3));
            series.fail_open.push(count(|row| row.4));
            series.delayed.push(count(|row| row.5));
            series.unmatched.push(count(|row| row.6));
            series.p50_us.push(row.and_then(|row| row.7));
            series.p99_us.push(row.and_then(|row| row.8));
            series.p999_us.push(row.and_then(|row| row.9));
            t += step;
        }
        Ok(series)
    }

    async fn history_sums(
        &self,
        of: &HistoryOf,
        from: i64,
        to: i64,
        step: i64,
    ) -> Result<Vec<SumRow>, ControlError> {
        let (rule, caller) = of.columns();
        let from = from - from.rem_euclid(step);
        let rows = on!(&self.db, pool => {
            sqlx::query_as(SERIES).bind(step).bind(rule).bind(caller).bind(from).bind(to).fetch_all(pool).await?
        });
        Ok(rows)
    }

    /// Returns what made up a series in a range: the most denied callers of a rule, the busiest callers of all
    /// requests, or the rules that denied a caller.
    ///
    /// # Errors
    /// [`ControlError`] if the database is unavailable.
    pub async fn history_top(
        &self,
        of: &HistoryOf,
        from: i64,
        to: i64,
        limit: i64,
    ) -> Result<Vec<HistoryRank>, ControlError> {
        let (rule, caller) = of.columns();
        let none =
            HistoryRank { key_id: None, key_masked: None, domain: None, rule: None, allow: 0, deny: 0 };
        if caller != 0 {
            let rows: Vec<(String, String, i64, i64)> = on!(&self.db, pool => {
                sqlx::query_as(DENYING_RULES).bind(caller).bind(from).bind(to).bind(limit).fetch_all(pool).await?
            });
            let rank = |(domain, rule, allow, deny)| HistoryRank {
                domain: Some(domain),
                rule: Some(rule),
                allow,
                deny,
                ..none.clone()
            };
            return Ok(rows.into_iter().map(rank).collect());
        }
        let rows: Vec<(i64, String, i64, i64)> = on!(&self.db, pool => {
            sqlx::query_as(TOP_CALLERS).bind(rule).bind(from).bind(to).bind(limit).fetch_all(pool).await?
        });
        let rank = |(id, shown, allow, deny): (i64, String, i64, i64)| HistoryRank {
            key_id: Some(format!("{:016x}", id.cast_unsigned())),
            key_masked: Some(shown),
            allow,
            deny,
            ..none.clone()
        };
        Ok(rows.into_iter().map(rank).collect())
    }

    /// Returns the display of a caller that the history knows.
    ///
    /// # Errors
    /// [`ControlError`] if the database is unavailable.
    pub async fn history_caller(&self, id: u64) -> Result<Option<String>, ControlError> {
        let select = "SELECT name FROM history_names WHERE kind = 'caller' AND id = $1";
        let row: Option<(String,)> = on!(&self.db, pool => {
            sqlx::query_as(select).bind(id.cast_signed()).fetch_optional(pool).await?
        });
        Ok(row.map(|(name,)| name))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The page draws at most some hundred steps, and never steps that are not stored any more.
    #[test]
    fn steps_suit_their_range() {
        let now = 1_800_000_000;
        for (hours, step) in
            [(1, 60), (6, 60), (24, 300), (48, 600), (24 * 7, 1_800), (24 * 30, 7_200), (24 * 3_650, 86_400)]
        {
            assert_eq!(history_step(now - hours * 3_600, now, now), step, "{hours} h");
        }
        // An hour of last week.
        assert_eq!(history_step(now - 7 * 86_400, now - 7 * 86_400 + 3_600, now), 600);
    }
}
