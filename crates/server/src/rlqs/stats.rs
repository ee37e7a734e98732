//! Figures of quota streams, for metrics.

use super::table::TableStats;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use tollgate_observe::MetricsWriter;

/// Figures of the quota service; cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct RlqsStats(Arc<Figures>);

#[derive(Debug, Default)]
struct Figures {
    streams: AtomicU64,
    buckets: AtomicU64,
    outstanding: AtomicU64,
    assigned: AtomicU64,
    charged: AtomicU64,
    returned: AtomicU64,
    denied: AtomicU64,
    rejected: AtomicU64,
    invalid: AtomicU64,
}

impl RlqsStats {
    pub(super) fn set_streams(&self, streams: usize) {
        self.0.streams.store(streams as u64, Ordering::Relaxed);
    }

    pub(super) fn reject_bucket(&self) {
        self.0.rejected.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn reject_invalid(&self, count: u64) {
        self.0.invalid.fetch_add(count, Ordering::Relaxed);
    }

    /// Returns the number of reports of buckets without a place, and of those that are invalid.
    pub(super) fn rejected(&self) -> (u64, u64) {
        (self.0.rejected.load(Ordering::Relaxed), self.0.invalid.load(Ordering::Relaxed))
    }

    pub(super) fn set(&self, stats: TableStats) {
        let counters = &*self.0;
        let all = [
            (&counters.buckets, stats.buckets),
            (&counters.outstanding, stats.outstanding),
            (&counters.assigned, stats.assigned),
            (&counters.charged, stats.charged),
            (&counters.returned, stats.returned),
            (&counters.denied, stats.denied),
        ];
        all.into_iter().for_each(|(counter, value)| counter.store(value, Ordering::Relaxed));
    }

    /// Writes the metrics.
    pub fn metrics(&self, page: &mut MetricsWriter) {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let stats = &*self.0;
        page.gauge("ratelimit_rlqs_streams", "Number of open quota streams.", read(&stats.streams));
        let help = "Number of buckets on quota streams, lost ones included until their assignments expire.";
        page.gauge("ratelimit_rlqs_buckets", help, read(&stats.buckets));
        let help = "Number of units that are assigned to quota streams and may still be admitted.";
        page.gauge("ratelimit_rlqs_outstanding_units", help, read(&stats.outstanding));
        let help = "Number of quota assignments and abandonments sent.";
        page.counter("ratelimit_rlqs_assignments_total", help, read(&stats.assigned));
        let help = "Number of units charged for quota streams.";
        page.counter("ratelimit_rlqs_charged_units_total", help, read(&stats.charged));
        let help = "Number of charged units that quota streams did not use, returned to their windows.";
        page.counter("ratelimit_rlqs_returned_units_total", help, read(&stats.returned));
        let help = "Number of charges for quota streams that a limit denied.";
        page.counter("ratelimit_rlqs_denied_charges_total", help, read(&stats.denied));
        let help = "Number of reports of buckets that get no assignment: beyond the maximum per stream, in total or in bytes, or invalid.";
        let (without_place, invalid) = self.rejected();
        page.counter("ratelimit_rlqs_rejected_buckets_total", help, without_place + invalid);
    }
}
