//! An upstream with workers and a queue behind a gate, in virtual time, under an open-loop Poisson load.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, VecDeque};
use tollgate_core::Timestamp;
use tollgate_core::conformance::SplitMix64;
use tollgate_overload::{
    Arrival, Ended, Entry, Gate, GateConfig, GateMode, Priority, Ticket, TierIndex, Waited,
};

/// A tenant: its part of the load, and its tier.
#[derive(Clone, Copy)]
pub(crate) struct Tenant {
    pub(crate) weight: f64,
    pub(crate) tier: TierIndex,
    /// Whether every request has a new name.
    pub(crate) has_new_names: bool,
}

impl Tenant {
    pub(crate) const fn new(weight: f64, tier: TierIndex) -> Self {
        Self { weight, tier, has_new_names: false }
    }
}

pub(crate) struct World<'a> {
    pub(crate) seed: u64,
    pub(crate) workers: usize,
    pub(crate) seconds: f64,
    /// Requests per second at a time.
    pub(crate) load: &'a dyn Fn(f64) -> f64,
    /// Service time of a request that starts at a time.
    pub(crate) service: &'a dyn Fn(f64, &mut SplitMix64) -> f64,
    /// Whether a request that ends at a time fails.
    pub(crate) fails: &'a dyn Fn(f64) -> bool,
    /// Parts of the priorities.
    pub(crate) mix: [f64; 4],
    pub(crate) tenants: &'a [Tenant],
    /// Callers of each tenant.
    pub(crate) callers: u64,
    pub(crate) gate: GateConfig,
}

/// What became of a request.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Fate {
    /// Served after this many seconds.
    Served(f64),
    Shed,
    /// Answered with a failure.
    Failed,
    /// Its client left before it was answered.
    Left,
    /// Still under way at the end.
    Open,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Request {
    pub(crate) at: f64,
    pub(crate) priority: Priority,
    pub(crate) tenant: usize,
    pub(crate) fate: Fate,
}

/// Time after which a client is gone.
const CLIENT_TIMEOUT: f64 = 1.0;

impl Request {
    pub(crate) fn is_good(&self) -> bool {
        matches!(self.fate, Fate::Served(latency) if latency <= CLIENT_TIMEOUT)
    }
}

fn stamp(at: f64) -> Timestamp {
    Timestamp::from_micros(1_000_000 + (at * 1e6) as u64)
}

#[derive(Default)]
struct Upstream {
    busy: usize,
    queue: VecDeque<usize>,
}

pub(crate) struct Run {
    pub(crate) requests: Vec<Request>,
    /// (time, limit, threshold, in flight), once a tenth of a second.
    pub(crate) states: Vec<(f64, u32, u16, u32)>,
}

/// Runs the world.
pub(crate) fn run(world: &World<'_>) -> Run {
    let mut random = SplitMix64::new(world.seed);
    let gate = Gate::<usize>::new(&world.gate);
    let (mut requests, mut states) = (Vec::<Request>::new(), Vec::new());
    let mut tickets: HashMap<usize, Ticket> = HashMap::new();
    let mut upstream = Upstream::default();
    let mut done: BinaryHeap<Reverse<(u64, usize)>> = BinaryHeap::new();
    // Requests in the order in which their clients leave.
    let mut patient: VecDeque<usize> = VecDeque::new();
    let weights: Vec<f64> = world.tenants.iter().map(|tenant| tenant.weight).collect();
    let (mut next_arrival, mut next_state) = (0.0f64, 0.0f64);
    let start = |upstream: &mut Upstream, done: &mut BinaryHeap<_>, random: &mut SplitMix64, at: f64, id| {
        upstream.busy += 1;
        let ends = at + (world.service)(at, random);
        done.push(Reverse(((ends * 1e9) as u64, id)));
    };
    loop {
        let next_done = done.peek().map_or(f64::INFINITY, |Reverse((at, _))| *at as f64 / 1e9);
        let next_leave = patient.front().map_or(f64::INFINITY, |id| requests[*id].at + CLIENT_TIMEOUT);
        let at = next_arrival.min(next_done).min(next_leave);
        if at > world.seconds {
            break;
        }
        while next_state <= at {
            let state = gate.state(stamp(next_state));
            states.push((next_state, state.limit, state.threshold, state.in_flight));
            next_state += 0.1;
        }
        let now = stamp(at);
        let mut sent: Vec<(usize, Ticket)> = Vec::new();
        if at == next_leave {
            // The upstream also completes requests whose clients have left.
            let left = patient.pop_front().and_then(|id| Some((id, tickets.remove(&id)?)));
            if let Some((id, ticket)) = left {
                requests[id].fate = Fate::Left;
                sent.extend(gate.leave(ticket, now, Ended::Abandoned));
            }
        } else if next_arrival <= next_done {
            next_arrival += random.exponential(1.0 / (world.load)(at));
            let level = random.weighted_index(&world.mix);
            let tenant = random.weighted_index(&weights);
            let priority = Priority::ALL[level];
            let name = match world.tenants[tenant].has_new_names {
                true => 1 << 32 | requests.len() as u64,
                false => tenant as u64,
            };
            let arrival = Arrival {
                priority,
                caller: (name << 8) | random.below(world.callers),
                tenant: name,
                tier: world.tenants[tenant].tier,
            };
            let id = requests.len();
            requests.push(Request { at, priority, tenant, fate: Fate::Open });
            patient.push_back(id);
            match gate.enter(now, &arrival, GateMode::Live) {
                Entry::Admitted(ticket) | Entry::Shadowed(ticket, _) => sent.push((id, ticket)),
                Entry::Shed(_) => requests[id].fate = Fate::Shed,
                Entry::Full(waiting) => {
                    // A request that waits in vain stays shed.
                    requests[id].fate = Fate::Shed;
                    match gate.wait(now, waiting, id) {
                        Waited::Until(..) | Waited::Shed(_) => {}
                    }
                    sent.extend(gate.admit_waiting(now));
                }
            }
        } else {
            let Some(Reverse((_, id))) = done.pop() else { break };
            upstream.busy -= 1;
            if let Some(ticket) = tickets.remove(&id) {
                let ended = if (world.fails)(at) { Ended::Failed } else { Ended::Completed };
                requests[id].fate = Fate::Failed;
                if ended == Ended::Completed {
                    requests[id].fate = Fate::Served(at - requests[id].at);
                    gate.measure(&ticket, now);
                }
                sent.extend(gate.leave(ticket, now, ended));
            }
            if let Some(next) = upstream.queue.pop_front() {
                start(&mut upstream, &mut done, &mut random, at, next);
            }
        }
        for (id, ticket) in sent {
            requests[id].fate = Fate::Open;
            tickets.insert(id, ticket);
            if upstream.busy < world.workers {
                start(&mut upstream, &mut done, &mut random, at, id);
            } else {
                upstream.queue.push_back(id);
            }
        }
    }
    Run { requests, states }
}

impl Run {
    /// Returns the requests that arrived in this span.
    pub(crate) fn between(&self, from: f64, to: f64) -> impl Iterator<Item = &Request> + Clone {
        self.requests.iter().filter(move |request| (from..to).contains(&request.at))
    }

    /// Returns good answers per second.
    pub(crate) fn goodput(&self, from: f64, to: f64) -> f64 {
        self.between(from, to).filter(|request| request.is_good()).count() as f64 / (to - from)
    }

    /// Returns the part of the requests that was shed.
    pub(crate) fn shed(&self, from: f64, to: f64) -> f64 {
        let all = self.between(from, to);
        let shed = all.clone().filter(|request| request.fate == Fate::Shed).count();
        shed as f64 / all.count().max(1) as f64
    }

    /// Returns the part of some requests that was served in time.
    pub(crate) fn served(&self, from: f64, to: f64, which: impl Fn(&Request) -> bool) -> f64 {
        let all = self.between(from, to).filter(|request| which(request) && request.fate != Fate::Open);
        let good = all.clone().filter(|request| request.is_good()).count();
        good as f64 / all.count().max(1) as f64
    }

    /// Returns a quantile of the latency of what was served, in seconds.
    pub(crate) fn latency(&self, from: f64, to: f64, quantile: f64) -> f64 {
        let served = self.between(from, to).filter_map(|request| match request.fate {
            Fate::Served(latency) => Some(latency),
            Fate::Shed | Fate::Failed | Fate::Left | Fate::Open => None,
        });
        let mut served: Vec<f64> = served.collect();
        served.sort_unstable_by(f64::total_cmp);
        served[(served.len() as f64 * quantile) as usize]
    }

    /// Returns the standard deviation of the shed part, second by second.
    pub(crate) fn shed_deviation(&self, from: f64, to: f64) -> f64 {
        let seconds = (to - from) as usize;
        let parts: Vec<f64> =
            (0..seconds).map(|n| self.shed(from + n as f64, from + n as f64 + 1.0)).collect();
        let mean = parts.iter().sum::<f64>() / parts.len() as f64;
        (parts.iter().map(|part| (part - mean).powi(2)).sum::<f64>() / parts.len() as f64).sqrt()
    }
}
