//! Records the history: takes what telemetry counted in each minute and stores it in the control-plane database, in
//! the background. Minutes that cannot be stored wait, a bounded number of them, until the database answers.

use std::collections::VecDeque;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;
use tollgate_control::{ControlError, ControlPlane, HistoryCounts, HistoryMinute};
use tollgate_core::{TimeDelta, Timestamp};
use tollgate_observe::{Minute, Telemetry};

/// Minutes that wait for the database at most; older ones are dropped.
const MAX_PENDING: usize = 60;
/// Timeout of a write, and of all writes at shutdown.
const WRITE_TIMEOUT: Duration = Duration::from_secs(10);
const LAST_TIMEOUT: Duration = Duration::from_secs(1);
/// Minutes between two compactions when there is little to compact.
const COMPACTION: u64 = 10;

/// Records until `end` completes, and then what the last minute had so far.
pub(crate) async fn record(
    control: Arc<ControlPlane>,
    telemetry: Arc<Telemetry>,
    days: u32,
    end: impl Future<Output = ()> + Send,
) {
    telemetry.count_minutes();
    let mut end = pin!(end);
    let mut pending = VecDeque::new();
    let mut has_backlog = true;
    for minute in 0_u64.. {
        let at = start_of_minute(telemetry.now());
        let wait = (at + TimeDelta::from_secs(60)).since(telemetry.now());
        let ended = tokio::select! {
            () = tokio::time::sleep(Duration::from_micros(wait.as_micros())) => false,
            () = &mut end => true,
        };
        let counting = Arc::clone(&telemetry);
        let Ok(taken) = tokio::task::spawn_blocking(move || counting.take_minute()).await else { return };
        pending.push_back(stored(at.as_secs(), taken));
        if pending.len() > MAX_PENDING {
            pending.pop_front();
            tracing::warn!("the database does not answer; the history of a minute is lost");
        }
        if ended {
            let _ = tokio::time::timeout(LAST_TIMEOUT, write(&control, &mut pending)).await;
            return;
        }
        let work = async {
            write(&control, &mut pending).await?;
            if has_backlog || minute.is_multiple_of(COMPACTION) {
                has_backlog = control.compact_history(days).await? > 0;
            }
            Ok::<_, ControlError>(())
        };
        match tokio::time::timeout(WRITE_TIMEOUT, work).await {
            Ok(Ok(())) => {}
            // Replication already logs that the database is unavailable.
            Ok(Err(error)) => tracing::debug!(%error, "recording the history failed"),
            Err(_) => tracing::debug!("recording the history timed out"),
        }
    }
}

async fn write(control: &ControlPlane, pending: &mut VecDeque<HistoryMinute>) -> Result<(), ControlError> {
    while let Some(minute) = pending.front() {
        control.write_history(minute).await?;
        pending.pop_front();
    }
    Ok(())
}

const fn start_of_minute(now: Timestamp) -> Timestamp {
    Timestamp::from_secs(now.as_secs() / 60 * 60)
}

/// Returns a minute as the database has it.
fn stored(at: u64, minute: Minute) -> HistoryMinute {
    let totals = minute.totals;
    let rules = minute.rules.into_iter().map(|rule| {
        let (allow, deny, shadow_deny) = (rule.allow, rule.deny, rule.shadow_deny);
        (rule.domain, rule.rule, HistoryCounts { allow, deny, shadow_deny, ..HistoryCounts::default() })
    });
    let mut stored = HistoryMinute {
        at,
        total: HistoryCounts {
            allow: totals.allow,
            deny: totals.deny,
            shadow_deny: totals.shadow_deny,
            fail_open: totals.fail_open,
            delayed: totals.delayed,
            unmatched: totals.unmatched,
        },
        latency: totals.latency_us,
        rules: rules.collect(),
        ..HistoryMinute::default()
    };
    for caller in minute.callers {
        let deny = caller.denied.iter().map(|(.., denied)| denied).sum();
        // Requests are an estimate under load, denials are exact.
        let counts =
            HistoryCounts { allow: caller.requests.saturating_sub(deny), deny, ..HistoryCounts::default() };
        for (domain, rule, denied) in caller.denied {
            stored.denials.push((caller.id, caller.display.clone(), domain, rule, denied));
        }
        stored.callers.push((caller.id, caller.display, counts));
    }
    stored.denials.sort_by_key(|(.., denied)| std::cmp::Reverse(*denied));
    stored
}
