//! What fails and when, and when all cells agree again.

use super::callers::{Record, Traffic};
use super::sites::values;
use super::subjects::{Subject, is_whole};
use super::{NODES, REGIONS};
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Lag of a cell that counts as up to date: the alert's.
const UP_TO_DATE: f64 = 0.5;
/// Time in which all must agree again.
const PATIENCE: Duration = Duration::from_secs(40);
/// Time in which the last units of the ledger reach all cells.
const SETTLED: Duration = Duration::from_millis(1_500);

/// What fails; regions are named by their numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fault {
    Nothing,
    /// What the first sends to the second is lost.
    OneWay(usize, usize),
    /// It is cut off from all others.
    CutOff(usize),
    /// Its nodes and its store are killed, and started again empty.
    RegionDies(usize),
    /// Its store is killed, and started again empty.
    StoreDies(usize),
}

const FAULTS: [Fault; 5] =
    [Fault::Nothing, Fault::OneWay(1, 2), Fault::CutOff(2), Fault::RegionDies(0), Fault::StoreDies(1)];

impl Fault {
    pub(super) fn name(self) -> String {
        match self {
            Self::Nothing => "long links".to_owned(),
            Self::OneWay(from, to) => format!("{} to {} is lost", REGIONS[from], REGIONS[to]),
            Self::CutOff(region) => format!("{} is cut off", REGIONS[region]),
            Self::RegionDies(region) => format!("{} dies", REGIONS[region]),
            Self::StoreDies(region) => format!("the Redis of {} dies", REGIONS[region]),
        }
    }

    fn begin(self, subject: &Subject) {
        match self {
            Self::Nothing => {}
            Self::OneWay(from, to) => subject.sites.links.set_lost(from, to, true),
            Self::CutOff(region) => cut_off(subject, region, true),
            Self::RegionDies(region) => subject.sites.kill_region(region),
            Self::StoreDies(region) => subject.sites.kill_store(region),
        }
    }

    fn end(self, subject: &Subject) -> Result<(), String> {
        match self {
            Self::Nothing => {}
            Self::OneWay(from, to) => subject.sites.links.set_lost(from, to, false),
            Self::CutOff(region) => cut_off(subject, region, false),
            Self::RegionDies(region) => return subject.sites.start_region(region),
            Self::StoreDies(region) => return subject.sites.start_store(region),
        }
        Ok(())
    }
}

fn cut_off(subject: &Subject, region: usize, is_lost: bool) {
    for other in (0..REGIONS.len()).filter(|other| *other != region) {
        subject.sites.links.set_lost(region, other, is_lost);
        subject.sites.links.set_lost(other, region, is_lost);
    }
}

/// What happened in one fault.
pub(super) struct Found {
    pub(super) number: usize,
    pub(super) fault: Fault,
    pub(super) begin: Duration,
    /// When all agreed again.
    pub(super) end: Duration,
    /// Largest lag between two cells.
    pub(super) lag_ms: f64,
    /// How long after its end all agreed, if they did.
    pub(super) agreed: Option<Duration>,
    /// Units that each region has counted in the ledger beyond what was admitted, as its first node says; and what was admitted.
    pub(super) ledger: Vec<Option<i64>>,
    pub(super) admitted: u64,
}

/// Runs a limiter through all faults of this length.
pub(super) fn run(subject: &Subject, length: Duration) -> Result<(Vec<Found>, Vec<Record>), String> {
    let traffic = Traffic::new(subject)?;
    let found = std::thread::scope(|scope| {
        traffic.start(scope);
        // Bursts of the steady traffic are used up.
        std::thread::sleep(length);
        let faults =
            FAULTS.into_iter().filter(|fault| subject.has_stores() || !matches!(fault, Fault::StoreDies(_)));
        let found = faults.enumerate().map(|(number, fault)| one(subject, &traffic, (number, fault), length));
        let found = found.collect::<Result<Vec<Found>, String>>();
        traffic.end();
        found
    })?;
    let counts = subject.sites.links.counts();
    crate::report::note(&format!(
        "({}: {} messages on the links were overtaken, {} lost, {} cut in half)\n",
        subject.name,
        counts.overtaken.load(Ordering::Relaxed),
        counts.lost.load(Ordering::Relaxed),
        counts.halved.load(Ordering::Relaxed),
    ));
    Ok((found, traffic.into_records()))
}

fn one(
    subject: &Subject,
    traffic: &Traffic<'_>,
    (number, fault): (usize, Fault),
    length: Duration,
) -> Result<Found, String> {
    let begin = traffic.clock.elapsed();
    fault.begin(subject);
    let mut lag = watch(subject, traffic, begin + length / 2);
    traffic.burst(number);
    lag = lag.max(watch(subject, traffic, begin + length));
    fault.end(subject)?;
    let ended = traffic.clock.elapsed();
    if !subject.has_metrics {
        std::thread::sleep(length / 2);
        let end = traffic.clock.elapsed();
        return Ok(Found {
            number,
            fault,
            begin,
            end,
            lag_ms: 0.0,
            agreed: None,
            ledger: Vec::new(),
            admitted: 0,
        });
    }
    // What a dead store had is restored but for a second; that is reported, not waited for.
    let target = match fault {
        Fault::RegionDies(_) | Fault::StoreDies(_) => 0,
        _ => traffic.ledger.load(Ordering::Relaxed),
    };
    let mut agreed = None;
    while agreed.is_none() && traffic.clock.elapsed() < ended + PATIENCE {
        let is_agreed = (0..NODES).all(|node| {
            is_whole(&subject.sites, node)
                && lags(subject, node).iter().all(|lag| *lag < UP_TO_DATE)
                && subject.ledger(node).is_some_and(|counted| counted >= target)
        });
        agreed = is_agreed.then(|| traffic.clock.elapsed() - ended);
        std::thread::sleep(Duration::from_millis(50));
    }
    let end = traffic.clock.elapsed();
    let (ledger, admitted) = compare(subject, traffic);
    Ok(Found { number, fault, begin, end, lag_ms: 1e3 * lag, agreed, ledger, admitted })
}

/// Returns the largest lag until this time.
fn watch(subject: &Subject, traffic: &Traffic<'_>, until: Duration) -> f64 {
    let mut largest = 0.0_f64;
    while traffic.clock.elapsed() < until {
        for node in (0..NODES).filter(|node| subject.has_metrics && subject.sites.nodes[*node].is_alive()) {
            largest = lags(subject, node).into_iter().fold(largest, f64::max);
        }
        std::thread::sleep(Duration::from_millis(100));
    }
    largest
}

fn lags(subject: &Subject, node: usize) -> Vec<f64> {
    values(&subject.sites.metrics(node).unwrap_or_default(), "ratelimit_region_lag_seconds")
}

/// Compares what each region has counted in the ledger with what was admitted, while nothing is added.
fn compare(subject: &Subject, traffic: &Traffic<'_>) -> (Vec<Option<i64>>, u64) {
    traffic.is_ledger_paused.store(true, Ordering::Relaxed);
    std::thread::sleep(SETTLED);
    let admitted = traffic.ledger.load(Ordering::Relaxed);
    let beyond = |node| subject.ledger(node).map(|counted| counted as i64 - admitted as i64);
    let each = (0..NODES).step_by(2).map(beyond).collect();
    traffic.is_ledger_paused.store(false, Ordering::Relaxed);
    (each, admitted)
}
