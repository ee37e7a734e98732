//! Writes the history of one minute of this node.
//!
//! A row is replaced if it is written again, so a write whose response was lost can be repeated.

use super::{HistoryCounts, HistoryLatency, HistoryOf, MAX_CALLERS, MINUTE, rule_id};
use crate::billing::ledger::clean;
use crate::control_plane::ControlPlane;
use crate::db::on;
use crate::error::ControlError;
use sqlx::AssertSqlSafe;
use std::collections::BTreeMap;

/// One minute of one node.
#[derive(Clone, Debug, Default)]
pub struct HistoryMinute {
    /// Start of the minute, in seconds since the epoch.
    pub at: u64,
    /// All requests.
    pub total: HistoryCounts,
    /// Latency of all requests.
    pub latency: HistoryLatency,
    /// Rules with traffic: domain, name, counts.
    pub rules: Vec<(String, String, HistoryCounts)>,
    /// The busiest callers: id, display, counts. At most 50 are stored.
    pub callers: Vec<(u64, String, HistoryCounts)>,
    /// The most denied callers of rules: id, display, domain, rule, denials. At most 50 are stored.
    pub denials: Vec<(u64, String, String, String, u64)>,
}

/// A row to write.
struct Row {
    of: (i64, i64),
    counts: HistoryCounts,
    latency: HistoryLatency,
}

/// Kind and id of a name.
type NameKey = (&'static str, i64);

/// Rows per statement.
const ROWS: usize = 64;
/// Columns of a row.
const COLUMNS: usize = 14;
const INTO: &str = "INSERT INTO history (rule, caller, step, at, node, allow, deny, shadow_deny, fail_open, delayed, \
     unmatched, p50_us, p99_us, p999_us) VALUES ";
const REPLACING: &str = " ON CONFLICT (rule, caller, step, at, node) DO UPDATE SET allow = excluded.allow, \
     deny = excluded.deny, shadow_deny = excluded.shadow_deny, fail_open = excluded.fail_open, \
     delayed = excluded.delayed, unmatched = excluded.unmatched, p50_us = excluded.p50_us, \
     p99_us = excluded.p99_us, p999_us = excluded.p999_us";
const NAME: &str = "INSERT INTO history_names (kind, id, domain, name, seen_at) VALUES ($1, $2, $3, $4, $5)
     ON CONFLICT (kind, id) DO UPDATE SET seen_at = excluded.seen_at, name = excluded.name
     WHERE history_names.seen_at < excluded.seen_at - 3600";

/// Returns the statement for this many rows.
fn statement(rows: usize) -> String {
    let row = |at: usize| {
        let columns: Vec<String> =
            (1..=COLUMNS).map(|column| format!("${}", at * COLUMNS + column)).collect();
        format!("({})", columns.join(","))
    };
    format!("{INTO}{}{REPLACING}", (0..rows).map(row).collect::<Vec<_>>().join(","))
}

impl ControlPlane {
    /// Stores a minute of this node, all of it or nothing.
    ///
    /// # Errors
    /// [`ControlError`] if the database fails.
    pub async fn write_history(&self, minute: &HistoryMinute) -> Result<(), ControlError> {
        let at = i64::try_from(minute.at).unwrap_or(i64::MAX);
        let (rows, names) = (rows(minute), names(minute));
        on!(&self.db, write pool => {
            let mut tx = pool.begin().await?;
            for chunk in rows.chunks(ROWS) {
                let text = statement(chunk.len());
                let mut query = sqlx::query(AssertSqlSafe(text)).persistent(false);
                for row in chunk {
                    let count = |count: u64| i64::try_from(count).unwrap_or(i64::MAX);
                    let counts = &row.counts;
                    query = query.bind(row.of.0).bind(row.of.1).bind(MINUTE).bind(at).bind(self.instance.clone());
                    for value in [counts.allow, counts.deny, counts.shadow_deny, counts.fail_open, counts.delayed, counts.unmatched] {
                        query = query.bind(count(value));
                    }
                    for value in row.latency {
                        query = query.bind(value.map(count));
                    }
                }
                query.execute(&mut *tx).await?;
            }
            for ((kind, id), (domain, name)) in &names {
                sqlx::query(NAME)
                    .bind(*kind)
                    .bind(*id)
                    .bind(domain.clone())
                    .bind(name.clone())
                    .bind(at)
                    .execute(&mut *tx)
                    .await?;
            }
            tx.commit().await?;
        });
        Ok(())
    }
}

fn rows(minute: &HistoryMinute) -> Vec<Row> {
    let row = |of: HistoryOf, counts| Row { of: of.columns(), counts, latency: [None; 3] };
    let mut rows = vec![Row { of: HistoryOf::All.columns(), counts: minute.total, latency: minute.latency }];
    for (domain, rule, counts) in &minute.rules {
        rows.push(row(HistoryOf::Rule(domain.clone(), rule.clone()), *counts));
    }
    // A caller without an id cannot be told from all callers.
    for (id, _, counts) in minute.callers.iter().filter(|(id, ..)| *id != 0).take(MAX_CALLERS) {
        rows.push(row(HistoryOf::Caller(*id), *counts));
    }
    for (id, _, domain, rule, denied) in minute.denials.iter().filter(|(id, ..)| *id != 0).take(MAX_CALLERS) {
        let counts = HistoryCounts { deny: *denied, ..HistoryCounts::default() };
        rows.push(row(HistoryOf::CallerAtRule(*id, domain.clone(), rule.clone()), counts));
    }
    // A statement may not write a row twice: callers of two kinds may share an id.
    let mut seen = std::collections::HashSet::new();
    rows.retain(|row| seen.insert(row.of));
    rows
}

/// Returns the names of all rows, in the order in which every node writes them, so that no two deadlock.
fn names(minute: &HistoryMinute) -> BTreeMap<NameKey, (String, String)> {
    let mut names = BTreeMap::new();
    let rules = minute.rules.iter().map(|(domain, rule, _)| (domain, rule));
    let denying = minute.denials.iter().take(MAX_CALLERS).map(|(_, _, domain, rule, _)| (domain, rule));
    for (domain, rule) in rules.chain(denying) {
        names.insert(("rule", rule_id(domain, rule)), (domain.clone(), rule.clone()));
    }
    let callers = minute.callers.iter().take(MAX_CALLERS).map(|(id, display, _)| (id, display));
    let denied = minute.denials.iter().take(MAX_CALLERS).map(|(id, display, ..)| (id, display));
    for (id, display) in callers.chain(denied) {
        names.insert(("caller", id.cast_signed()), (String::new(), display.clone()));
    }
    // A caller's text may hold what a database refuses.
    names.values_mut().for_each(|(domain, name)| (*domain, *name) = (clean(domain), clean(name)));
    names
}
