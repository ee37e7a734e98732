//! The traffic: attackers and honest callers of every mode, at every node.

use super::super::connection::Connection;
use super::super::load::lock;
use super::subjects::{Kind, Subject, Verdict};
use super::{BURST, NODES, RATE};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Barrier, Mutex};
use std::thread::Scope;
use std::time::Duration;
use tollgate_testing::wait::Stopwatch;

/// Longest time that a request is expected to take: with as many senders, the traffic does not wait for answers.
const PATIENCE: f64 = 0.25;
/// Connections to a node that a burst is spread over.
const TOGETHER: usize = 10;

/// Who sends a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Caller {
    /// Three times the limit, evenly at all nodes.
    Attacker,
    /// Half of a burst at each node at once, in the fault of this number.
    Burst(usize),
    /// Half of the limit, evenly at all nodes.
    Even,
    /// Half of the limit, in the last region.
    Home,
    /// A few requests of the limit that never runs out, evenly at all nodes.
    Ledger,
}

/// A request that was answered.
#[derive(Clone, Copy, Debug)]
pub(super) struct Record {
    pub(super) mode: usize,
    pub(super) caller: Caller,
    pub(super) sent: Duration,
    pub(super) received: Duration,
    pub(super) verdict: Verdict,
}

/// The state of the traffic.
pub(super) struct Traffic<'a> {
    subject: &'a Subject,
    pub(super) clock: Stopwatch,
    stop: AtomicBool,
    pub(super) is_ledger_paused: AtomicBool,
    /// Units of the ledger that were admitted, and requests of it that were not answered.
    pub(super) ledger: AtomicU64,
    pub(super) unanswered: AtomicU64,
    /// Keys of attackers, by mode.
    victims: Vec<String>,
    records: Mutex<Vec<Record>>,
}

impl<'a> Traffic<'a> {
    pub(super) fn new(subject: &'a Subject) -> Result<Self, String> {
        let victims = (0..subject.modes.len()).map(|mode| subject.victim(mode)).collect::<Result<_, _>>()?;
        Ok(Self {
            subject,
            clock: Stopwatch::start(),
            stop: AtomicBool::new(false),
            is_ledger_paused: AtomicBool::new(false),
            ledger: AtomicU64::new(0),
            unanswered: AtomicU64::new(0),
            victims,
            records: Mutex::default(),
        })
    }

    /// Starts all senders but those of bursts; they end with [`Self::end`].
    pub(super) fn start<'scope>(&'scope self, scope: &'scope Scope<'scope, '_>) {
        let last = NODES / 2 * 2 - 2;
        for node in 0..NODES {
            for mode in 0..self.subject.modes.len() {
                self.spawn(scope, node, mode, Caller::Attacker, 3.0 * RATE as f64 / NODES as f64);
                self.spawn(scope, node, mode, Caller::Even, 0.5 * RATE as f64 / NODES as f64);
                if node >= last {
                    self.spawn(scope, node, mode, Caller::Home, 0.25 * RATE as f64);
                }
            }
            if self.subject.has_metrics {
                self.spawn(scope, node, 0, Caller::Ledger, 5.0);
            }
        }
    }

    fn spawn<'scope>(
        &'scope self,
        scope: &'scope Scope<'scope, '_>,
        node: usize,
        mode: usize,
        caller: Caller,
        per_second: f64,
    ) {
        let senders = (per_second * PATIENCE).ceil();
        for sender in 0..senders as usize {
            let pause = Duration::from_secs_f64(senders / per_second);
            // Nodes and senders take turns.
            let turn = (sender as f64 + node as f64 / NODES as f64) / senders;
            scope.spawn(move || {
                let records = self.send(node, mode, caller, pause, pause.mul_f64(turn));
                lock(&self.records).extend(records);
            });
        }
    }

    fn send(
        &self,
        node: usize,
        mode: usize,
        caller: Caller,
        pause: Duration,
        first: Duration,
    ) -> Vec<Record> {
        let (mut records, mut connection) = (Vec::new(), None);
        let mut due = self.clock.elapsed() + first;
        while !self.stop.load(Ordering::Relaxed) {
            std::thread::sleep(due.saturating_sub(self.clock.elapsed()));
            // One that is late does not make up for it.
            due = (due + pause).max(self.clock.elapsed());
            if caller == Caller::Ledger && self.is_ledger_paused.load(Ordering::Relaxed) {
                continue;
            }
            records.extend(self.request(&mut connection, node, mode, caller));
        }
        records
    }

    /// Sends one request, if the node can be reached.
    fn request(
        &self,
        connection: &mut Option<Connection>,
        node: usize,
        mode: usize,
        caller: Caller,
    ) -> Option<Record> {
        if connection.is_none() {
            *connection = self.subject.sites.nodes[node].connect().ok();
        }
        let name = match caller {
            Caller::Attacker => self.victims[mode].clone(),
            Caller::Burst(number) => format!("burst-{number}"),
            Caller::Even => "even".to_owned(),
            Caller::Home => "home".to_owned(),
            Caller::Ledger => "all".to_owned(),
        };
        let kind = match caller {
            Caller::Attacker | Caller::Burst(_) => Kind::Attacked,
            Caller::Even | Caller::Home => Kind::Honest,
            Caller::Ledger => Kind::Ledger,
        };
        let sent = self.clock.elapsed();
        let answer = self.subject.check(connection.as_mut()?, mode, kind, &name);
        let received = self.clock.elapsed();
        if caller == Caller::Ledger {
            self.ledger.fetch_add(u64::from(answer == Ok(Verdict::Allowed)), Ordering::Relaxed);
            self.unanswered.fetch_add(u64::from(answer.is_err()), Ordering::Relaxed);
        }
        match answer {
            Ok(verdict) => Some(Record { mode, caller, sent, received, verdict }),
            Err(_) => {
                *connection = None;
                None
            }
        }
    }

    /// Sends half of a burst to every node at once, to one mode after another.
    pub(super) fn burst(&self, number: usize) {
        let each = BURST as usize / 2 / TOGETHER;
        for mode in 0..self.subject.modes.len() {
            let begin = Barrier::new(NODES * TOGETHER);
            std::thread::scope(|scope| {
                for node in 0..NODES {
                    for _ in 0..TOGETHER {
                        let begin = &begin;
                        scope.spawn(move || {
                            let mut connection = self.subject.sites.nodes[node].connect().ok();
                            begin.wait();
                            let one = |_| self.request(&mut connection, node, mode, Caller::Burst(number));
                            let records: Vec<Record> = (0..each).filter_map(one).collect();
                            lock(&self.records).extend(records);
                        });
                    }
                }
            });
        }
    }

    /// Stops the senders.
    pub(super) fn end(&self) {
        self.stop.store(true, Ordering::Relaxed);
    }

    pub(super) fn into_records(self) -> Vec<Record> {
        self.records.into_inner().unwrap_or_default()
    }
}
