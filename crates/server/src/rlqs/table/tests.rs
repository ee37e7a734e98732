//! The table over real counters in virtual time, with clients that spend all they may: the sum of what streams and
//! checks admit stays within the limit in any span of time.

use super::*;
use proptest::prelude::*;
use slow_passes::SlowClock;
use std::collections::VecDeque;
use tollgate_core::{Clock, Cost, ManualClock};
use tollgate_engine::{AheadKind, Check};
use tollgate_rules::{Options, Ruleset, Source};
use tollgate_store::{MemoryConfig, MemoryStore};

const STEP: u64 = 50_000;
const REPORT_STEPS: u64 = 100;

type Memory = Arc<MemoryStore<Arc<ManualClock>>>;

/// Envoy's side of one bucket, in the version that starts every changed bucket full.
#[derive(Default)]
struct Client {
    stream: StreamId,
    /// Requests per step.
    offered: f64,
    waiting: f64,
    assignment: Option<Assignment>,
    expires: u64,
    tokens: f64,
    allowed: u64,
    denied: u64,
    is_subscribed: bool,
    /// Actions under way, by the step of their arrival.
    incoming: VecDeque<(u64, Action)>,
    next_report: u64,
}

impl Client {
    fn receive(&mut self, step: u64) {
        while self.incoming.front().is_some_and(|(at, _)| *at <= step) {
            let Some((_, action)) = self.incoming.pop_front() else { return };
            match action {
                Action::Abandon => (self.assignment, self.is_subscribed) = (None, false),
                Action::Assign(assignment, ttl) => {
                    if self.assignment != Some(assignment)
                        && let Assignment::Tokens(tokens) = assignment
                    {
                        self.tokens = f64::from(tokens.max);
                    }
                    (self.assignment, self.expires) = (Some(assignment), step + ttl * 1_000_000 / STEP);
                }
            }
        }
        if step >= self.expires {
            self.assignment = None;
        }
    }

    /// Offers the requests of one step and returns how many pass. Without an assignment, none does.
    fn offer(&mut self) -> u64 {
        self.waiting += self.offered;
        let requests = self.waiting.floor();
        self.waiting -= requests;
        let passed = match self.assignment {
            Some(Assignment::Tokens(tokens)) => {
                let filled = self.tokens + tokens.rate() * STEP as f64 / 1e6;
                self.tokens = filled.min(f64::from(tokens.max).max(self.tokens));
                requests.min((self.tokens + 1e-9).floor())
            }
            Some(Assignment::AllowAll) => requests,
            Some(Assignment::DenyAll) | None => 0.0,
        };
        self.tokens -= passed;
        (self.allowed, self.denied) =
            (self.allowed + passed as u64, self.denied + (requests - passed) as u64);
        passed as u64
    }
}

/// A server. All servers share one store, as several nodes share one Redis.
struct Node {
    limiter: Arc<Limiter<Memory>>,
    table: Table<Memory>,
}

struct World {
    clock: Arc<ManualClock>,
    slow: Arc<SlowClock>,
    start: Timestamp,
    nodes: Vec<Node>,
    clients: Vec<Client>,
    bucket: Arc<Bucket>,
    next_stream: StreamId,
    is_faulty: bool,
    returns_all: bool,
    step: u64,
    /// Units admitted at each step.
    admitted: Vec<u64>,
    /// Actions sent.
    sent: u64,
}

/// Rules of one limit; those of envoyproxy/ratelimit, with a `unit`, have its profile.
fn rules(limit: &str) -> Arc<Ruleset> {
    let (profile, key) =
        if limit.contains("unit:") { ("profile: envoy\n", "rate_limit") } else { ("", "limit") };
    let text = format!("domain: edge\n{profile}descriptors:\n  - key: tenant\n    {key}: {limit}\n");
    Arc::new(Ruleset::load(&[Source::new("rules.yaml", &text)], &Options::default()).expect("rules"))
}

impl World {
    fn new(limit: &str, clients: usize) -> Self {
        Self::with_nodes(limit, clients, 1)
    }

    fn with_nodes(limit: &str, clients: usize, nodes: usize) -> Self {
        let clock = Arc::new(ManualClock::at(Timestamp::from_secs(1_000_000)));
        let store = MemoryStore::new(&MemoryConfig::with_bytes(1 << 20), Arc::clone(&clock)).expect("memory");
        let (store, rules) = (Arc::new(store), rules(limit));
        let slow = Arc::new(SlowClock::new(Arc::clone(&clock)));
        let node = |_| {
            let (rules, store, clock) = (Arc::clone(&rules), Arc::clone(&store), Arc::clone(&slow));
            let limiter = Arc::new(Limiter::new(rules, store, clock as Arc<dyn Clock>));
            Node { table: Table::new(Arc::clone(&limiter)), limiter }
        };
        let entries = vec![("tenant".to_owned(), "a".to_owned())].into_boxed_slice();
        Self {
            nodes: (0..nodes).map(node).collect(),
            clock: Arc::clone(&clock),
            slow: Arc::clone(&slow),
            start: clock.now(),
            clients: (0..clients as u64).map(|stream| Client { stream, ..Client::default() }).collect(),
            bucket: Arc::new(Bucket { domain: Arc::from("edge"), entries }),
            next_stream: clients as u64,
            is_faulty: false,
            returns_all: false,
            step: 0,
            admitted: Vec::new(),
            sent: 0,
        }
    }

    /// Returns the node that serves a stream.
    fn node(&mut self, stream: StreamId) -> &mut Node {
        let count = self.nodes.len() as u64;
        &mut self.nodes[(stream % count) as usize]
    }

    /// Changes the limit on all nodes.
    fn change(&mut self, limit: &str) {
        for node in &self.nodes {
            node.limiter.replace_rules(rules(limit));
        }
    }

    /// Loses the stream of a client, which goes on with its assignment and reports on a new stream, maybe of another node.
    fn reconnect(&mut self, client: usize) {
        let stream = self.clients[client].stream;
        self.node(stream).table.lose(stream);
        self.open_stream(client);
    }

    /// Kills a node and starts another in its place, which knows nothing of the assignments that are out.
    fn restart(&mut self, node: usize) {
        let count = self.nodes.len();
        let node = node % count;
        self.nodes[node].table = Table::new(Arc::clone(&self.nodes[node].limiter));
        for client in 0..self.clients.len() {
            if self.clients[client].stream as usize % count == node {
                self.open_stream(client);
            }
        }
    }

    fn open_stream(&mut self, client: usize) {
        let client = &mut self.clients[client];
        (client.stream, client.is_subscribed, client.allowed, client.denied) =
            (self.next_stream, false, 0, 0);
        client.incoming.clear();
        self.next_stream += 1;
    }

    /// Advances by `steps`, with `direct` checks per step by another protocol. Actions arrive `delay` steps late.
    fn run(&mut self, steps: u64, direct: u64, delay: u64) {
        for _ in 0..steps {
            self.step += 1;
            self.clock.advance(TimeDelta::from_micros(STEP));
            let now = self.clock.now();
            let mut admitted = 0;
            let mut has_news = false;
            for client in &mut self.clients {
                client.receive(self.step);
                admitted += client.offer();
                let has_requests = client.allowed + client.denied > 0;
                if (!client.is_subscribed && has_requests)
                    || (client.is_subscribed && self.step >= client.next_report)
                {
                    let (allowed, denied) = (client.allowed, client.denied);
                    let report = Report { place: Place::uncounted(&self.bucket), allowed, denied };
                    let count = self.nodes.len() as u64;
                    self.nodes[(client.stream % count) as usize].table.report(client.stream, report, now);
                    (client.is_subscribed, client.allowed, client.denied) = (true, 0, 0);
                    client.next_report = self.step + REPORT_STEPS;
                    has_news = true;
                }
            }
            for at in 0..direct as usize {
                let check = Check::attributes("edge", &[("tenant", "a")]);
                let limiter = &self.nodes[at % self.nodes.len()].limiter;
                admitted += u64::from(pollster::block_on(limiter.check(&check)).is_allowed());
            }
            self.admitted.push(admitted);
            for Node { table, limiter } in &mut self.nodes {
                (table.spends_twice, table.returns_all) = (self.is_faulty, self.returns_all);
                if !has_news && !self.step.is_multiple_of(table.interval().as_micros() / STEP) {
                    continue;
                }
                let actions = self.slow.run(limiter, || pollster::block_on(table.pass()));
                let now = self.clock.now();
                table.check_kept(now);
                // Clients go on meanwhile.
                while now > self.start + TimeDelta::from_micros(self.step * STEP) {
                    self.step += 1;
                    let requests = self.clients.iter_mut().map(|client| {
                        client.receive(self.step);
                        client.offer()
                    });
                    self.admitted.push(requests.sum());
                }
                for (stream, _, action) in actions {
                    self.sent += 1;
                    let client = self.clients.iter_mut().find(|client| client.stream == stream);
                    if let Some(client) = client {
                        client.incoming.push_back((self.step + delay, action));
                    }
                }
            }
        }
    }

    /// Returns by how many units the most that was admitted in a span of time exceeds burst + rate × time.
    fn excess(&self, rate: f64, burst: f64) -> f64 {
        self.excess_since(0, rate, burst)
    }

    /// Returns the same for spans that begin at this step or later.
    fn excess_since(&self, first: usize, rate: f64, burst: f64) -> f64 {
        let (mut level, mut most) = (0.0_f64, 0.0_f64);
        for admitted in self.admitted.iter().skip(first) {
            level = (level - rate * STEP as f64 / 1e6).max(0.0) + *admitted as f64;
            most = most.max(level);
        }
        most - burst
    }

    /// Returns the number of actions per client and report interval that are sent in so many steps.
    fn sent_per_report(&mut self, steps: u64) -> f64 {
        let before = self.sent;
        self.run(steps, 0, 1);
        (self.sent - before) as f64 * REPORT_STEPS as f64 / (steps * self.clients.len() as u64) as f64
    }

    /// Returns the most tranches of a pool.
    fn tranches(&self) -> usize {
        let pools = self.nodes.iter().flat_map(|node| node.table.pools.values());
        pools.map(Pool::tranches).max().unwrap_or(0)
    }

    /// Returns what other protocols see as left of the limit.
    fn remaining(&self) -> u64 {
        self.remaining_of_each()[0]
    }

    /// Returns the same for each limit of the rule.
    fn remaining_of_each(&self) -> Vec<u64> {
        let check = Check::attributes("edge", &[("tenant", "a")]).with_cost(Cost::PEEK);
        let ahead = pollster::block_on(self.nodes[0].limiter.charge_ahead(&check, &[]));
        ahead.counters.iter().map(|counter| counter.remaining).collect()
    }

    fn total(&self) -> u64 {
        self.admitted.iter().sum()
    }

    fn rate(&self, last_steps: usize) -> f64 {
        let units: u64 = self.admitted.iter().rev().take(last_steps).sum();
        units as f64 / (last_steps as f64 * STEP as f64 / 1e6)
    }
}

/// One thing that happens.
#[derive(Clone, Debug)]
enum Happens {
    Demand(usize, f64),
    Reconnect(usize),
    Restart(usize),
    Run { steps: u64, direct: u64, delay: u64 },
}

fn happens() -> impl Strategy<Value = Happens> {
    prop_oneof![
        (0_usize..4, prop_oneof![Just(0.0), 0.0..20.0_f64])
            .prop_map(|(client, demand)| Happens::Demand(client, demand)),
        (0_usize..4).prop_map(Happens::Reconnect),
        (0_usize..4).prop_map(Happens::Restart),
        (1_u64..400, 0_u64..4, 0_u64..=2).prop_map(|(steps, direct, delay)| Happens::Run {
            steps,
            direct,
            delay
        }),
        (1_u64..400, Just(0_u64), 0_u64..=2).prop_map(|(steps, direct, delay)| Happens::Run {
            steps,
            direct,
            delay
        }),
    ]
}

fn play(world: &mut World, history: &[Happens]) {
    for event in history {
        match event {
            Happens::Demand(client, demand) => world.clients[*client].offered = *demand,
            Happens::Reconnect(client) => world.reconnect(*client),
            Happens::Restart(node) => world.restart(*node),
            Happens::Run { steps, direct, delay } => world.run(*steps, *direct, *delay),
        }
    }
}

/// Limits as (rule, rate per second, burst).
const LIMITS: [(&str, f64, f64); 5] = [
    ("{count: 600, period: minute}", 10.0, 600.0),
    ("{count: 40, period: second, burst: 400}", 40.0, 400.0),
    ("{count: 20, period: second, burst: 100}", 20.0, 100.0),
    ("{count: 100, period: second, burst: 300}", 100.0, 300.0),
    ("{count: 6, period: minute}", 0.1, 6.0),
];

/// Limits that change into each other: of one period, so that they share a counter.
const CHANGING: [(&str, f64, f64); 3] = [
    ("{count: 40, period: second, burst: 400}", 40.0, 400.0),
    ("{count: 20, period: second, burst: 100}", 20.0, 100.0),
    ("{count: 100, period: second, burst: 300}", 100.0, 300.0),
];
/// Steps after which no assignment of before is left: the longest time to live, and time to renew it with the next report.
const EXPIRED: u64 = 500;

proptest! {
    /// Without it a limit is exceeded: not one request more passes, whatever the streams do.
    #[test]
    fn streams_and_checks_together_stay_within_the_limit(
        limit in prop::sample::select(&LIMITS[..]),
        nodes in 1_usize..4,
        history in prop::collection::vec(happens(), 1..16),
    ) {
        let (rule, rate, burst) = limit;
        let mut world = World::with_nodes(rule, 4, nodes);
        play(&mut world, &history);
        prop_assert!(world.excess(rate, burst) <= 1e-6, "{} units too many", world.excess(rate, burst));
    }

    /// A limit that is changed while assignments of it are out: nobody ever gets more than the larger of the two allows,
    /// and from when those of before have expired, no more than the new one.
    #[test]
    fn a_changed_limit_is_kept(
        (before, after) in (prop::sample::select(&CHANGING[..]), prop::sample::select(&CHANGING[..])),
        nodes in 1_usize..3,
        (first, second) in (prop::collection::vec(happens(), 1..8), prop::collection::vec(happens(), 1..8)),
    ) {
        let mut world = World::with_nodes(before.0, 4, nodes);
        play(&mut world, &first);
        world.change(after.0);
        world.run(EXPIRED, 0, 1);
        let settled = world.admitted.len();
        play(&mut world, &second);
        let (rate, burst) = (before.1.max(after.1), before.2.max(after.2));
        prop_assert!(world.excess(rate, burst) <= 1e-6, "{} units too many", world.excess(rate, burst));
        let late = world.excess_since(settled, after.1, after.2);
        prop_assert!(late <= 1e-6, "{late} units too many of the new limit");
    }
}

/// A limit that is shared badly is as bad as none: what nobody else wants is used.
#[test]
fn the_limit_is_used_and_follows_demand() {
    for (rule, rate, burst) in LIMITS.into_iter().take(4) {
        let mut world = World::new(rule, 2);
        let per_step = rate * STEP as f64 / 1e6;
        (world.clients[0].offered, world.clients[1].offered) = (per_step * 3.0, per_step * 0.1);
        // Until the burst is used up.
        world.run(1_500, 0, 1);
        assert!(world.rate(400) >= 0.9 * rate, "{rule}: {} of {rate}", world.rate(400));
        (world.clients[0].offered, world.clients[1].offered) = (per_step * 0.1, per_step * 3.0);
        world.run(2 * REPORT_STEPS, 0, 1);
        world.run(400, 0, 1);
        assert!(world.rate(400) >= 0.9 * rate, "{rule}: {} of {rate} after the move", world.rate(400));
        assert!(world.excess(rate, burst) <= 1e-6, "{rule}: {}", world.excess(rate, burst));
    }
}

/// The test above is worth nothing if it does not find a server that counts units twice.
#[test]
fn a_planted_bug_is_found() {
    let (rule, rate, burst) = LIMITS[1];
    let mut world = World::new(rule, 2);
    world.is_faulty = true;
    (world.clients[0].offered, world.clients[1].offered) = (10.0, 10.0);
    world.run(2_000, 0, 1);
    assert!(world.excess(rate, burst) > 1.0, "{}", world.excess(rate, burst));
}

/// Limits without room for a whole time to live are covered until the next pass, and are used all the same, by one
/// stream or by several.
#[test]
fn a_limit_per_second_is_used_and_kept_while_the_server_runs() {
    for (rule, rate, burst) in [
        ("{count: 100, period: second}", 100.0, 100.0),
        ("{count: 1000, period: second}", 1000.0, 1000.0),
        ("{count: 50, period: second, burst: 75}", 50.0, 75.0),
        ("{count: 60, period: second, burst: 120}", 60.0, 120.0),
    ] {
        for demand in [&[1.2, 0.1][..], &[0.6, 0.6], &[0.5, 0.4, 0.3, 2.0], &[3.0]] {
            let mut world = World::new(rule, demand.len());
            for (client, demand) in world.clients.iter_mut().zip(demand) {
                client.offered = rate * demand * STEP as f64 / 1e6;
            }
            world.run(800, 0, 1);
            let used = world.rate(400) / rate;
            let least = if demand.len() > 2 { 0.85 } else { 0.9 };
            assert!(used >= least, "{rule}, {demand:?}: {used}");
            assert!(world.excess(rate, burst) <= 1e-6, "{rule}, {demand:?}: {}", world.excess(rate, burst));
        }
    }
}

#[test]
fn an_unlimited_bucket_is_allowed_and_an_idle_one_abandoned() {
    let mut world = World::new("{count: 1, period: second}", 1);
    world.bucket = Arc::new(Bucket {
        domain: Arc::from("edge"),
        entries: vec![("other".to_owned(), "a".to_owned())].into_boxed_slice(),
    });
    world.clients[0].offered = 1.0;
    world.run(20, 0, 0);
    assert_eq!(world.clients[0].assignment, Some(Assignment::AllowAll));
    world.clients[0].offered = 0.0;
    world.run(14 * REPORT_STEPS, 0, 0);
    assert!(!world.clients[0].is_subscribed && world.nodes[0].table.accounts.is_empty());
}

/// Demands of all clients together, in parts of the limit, and how they are divided.
const STEADY: [(f64, &[f64]); 5] = [
    (0.2, &[1.0]),
    (0.2, &[0.5, 0.3, 0.2]),
    (0.8, &[0.5, 0.5]),
    (0.8, &[0.4, 0.3, 0.2, 0.1]),
    (3.0, &[0.5, 0.4, 0.1]),
];

fn steady(rule: &str, rate: f64, (demand, parts): (f64, &[f64])) -> World {
    let mut world = World::new(rule, parts.len());
    for (client, part) in world.clients.iter_mut().zip(parts) {
        client.offered = rate * demand * part * STEP as f64 / 1e6;
    }
    world
}

/// A thousand streams of a hundred buckets are a load for server and network by what is sent to them.
#[test]
fn steady_demand_takes_one_assignment_per_report() {
    for (rule, rate, most) in [
        ("{count: 600, period: minute}", 10.0, 1.1),
        ("{count: 40, period: second, burst: 400}", 40.0, 1.1),
        ("{count: 1000, period: second, burst: 10000}", 1_000.0, 1.1),
        // Less burst, shorter assignments.
        ("{count: 20, period: second, burst: 100}", 20.0, 3.5),
        ("{count: 100, period: second, burst: 100}", 100.0, 8.5),
    ] {
        for demand in STEADY {
            let mut world = steady(rule, rate, demand);
            world.run(1_500, 0, 1);
            let sent = world.sent_per_report(4_000);
            // Streams that want more than there is share what comes back, and are covered for less time.
            let most = if demand.0 > 1.0 { f64::max(most, 2.0) } else { most };
            assert!(sent <= most, "{rule}, {demand:?}: {sent}");
        }
    }
}

/// A server that runs for a week needs no more memory than after a minute, whatever the streams do.
#[test]
fn accounts_stay_small() {
    for (rule, rate) in [
        ("{count: 600, period: minute}", 10.0),
        ("{count: 40, period: second, burst: 400}", 40.0),
        ("{count: 100, period: second, burst: 100}", 100.0),
    ] {
        for demand in STEADY {
            let mut world = steady(rule, rate, demand);
            let mut largest = 0;
            for _ in 0..500 {
                world.run(20, 0, 1);
                largest = largest.max(world.tranches());
            }
            assert!(largest <= 8, "{rule}, {demand:?}: {largest}");
        }
    }
}

mod debts;
mod envoy_profile;
mod lowered;
mod several_limits;
mod short_windows;
mod slow_passes;
mod windows;
