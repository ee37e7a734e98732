//! What overload protection adds to a request in process: a place among the requests in flight to an upstream, taken and
//! given back, by what the rules say of it. Servers read the clock when a request arrives, with or without overload protection: so does each
//! contestant, and what is added is the rest.

use crate::contest::measure;
use crate::contestants::Contestant;
use crate::report::{at_most, heading, rows};
use crate::traffic::{Law, Traffic};
use std::future::Future;
use std::hint::black_box;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use tollgate_core::{Clock, SystemClock, Timestamp};
use tollgate_engine::{Check, Ended, Limiter};
use tollgate_rules::{Options, Ruleset, Source};
use tollgate_store::{MemoryConfig, MemoryStore};

const WORKERS: &str = "domain: bench
overload:
  workers: {limit: adaptive, floor: 16, target: 2x}
";

const PRIORITIES: &str = "domain: bench
overload:
  priorities:
    - {when: {endpoint: POST /v1/charges}, priority: critical}
    - {when: {mode: test}, priority: sheddable}
    - {when: {method: [POST, PUT]}, priority: important}
  workers: {limit: adaptive, floor: 16, target: 2x}
";

const SHARES: &str = "domain: bench
overload:
  priorities:
    - {when: {endpoint: POST /v1/charges}, priority: critical}
    - {when: {mode: test}, priority: sheddable}
    - {when: {method: [POST, PUT]}, priority: important}
  workers: {limit: adaptive, floor: 16, target: 2x}
  fairness: {by: tenant, guarantees: {enterprise: 5% each, pro: 1% each, free: 10% together}}
";

/// Nanoseconds that a request may take on its path.
const BAR: f64 = 60.0;

/// A clock that is read like the system's and stands still, so that no control step finds that there are many requests: each is measured.
struct Stopped(SystemClock);

impl Clock for Stopped {
    fn now(&self) -> Timestamp {
        black_box(self.0.now());
        Timestamp::from_secs(1)
    }
}

struct Gated {
    name: &'static str,
    limiter: Limiter<MemoryStore<SystemClock>>,
}

impl Gated {
    fn new(name: &'static str, text: &str) -> Self {
        Self::with_clock(name, text, Arc::new(SystemClock::new()))
    }

    fn with_clock(name: &'static str, text: &str, time: Arc<dyn Clock>) -> Self {
        let source = Source { name: "bench.yaml".to_owned(), text: text.to_owned() };
        let rules = Ruleset::load(&[source], &Options::default()).expect("rules");
        let clock = SystemClock::new();
        let store = MemoryStore::new(&MemoryConfig::with_bytes(1 << 18), clock).expect("memory");
        Self { name, limiter: Limiter::new(Arc::new(rules), store, time) }
    }
}

impl Contestant for Gated {
    fn name(&self) -> String {
        self.name.into()
    }

    fn answer(&self, traffic: &Traffic) {
        let mut context = Context::from_waker(Waker::noop());
        for key in &traffic.block {
            let now = black_box(self.limiter.clock().now());
            let attributes =
                [("user", key.as_str()), ("method", "GET"), ("tenant", key.as_str()), ("tier", "pro")];
            let check = Check::attributes("bench", &attributes);
            match pin!(self.limiter.enter_upstream(&check, "upstream", now)).poll(&mut context) {
                Poll::Ready(Ok(place)) => {
                    if let Some(mut place) = black_box(place) {
                        place.ended(Ended::Completed);
                    }
                }
                Poll::Ready(Err(_)) | Poll::Pending => unreachable!("one request at a time is never shed"),
            }
        }
    }
}

pub(crate) fn run() {
    const KEYS: u64 = 1_000;
    let nothing = Gated::new("no overload section", "domain: bench\n");
    let workers = Gated::new("workers", WORKERS);
    let priorities = Gated::new("workers, priorities", PRIORITIES);
    let shares = Gated::new("workers, priorities, fairness", SHARES);
    let measured =
        Gated::with_clock("the same, each measured", SHARES, Arc::new(Stopped(SystemClock::new())));
    let all: [&dyn Contestant; 5] = [&nothing, &workers, &priorities, &shares, &measured];
    for threads in [1, 2] {
        heading(&format!("A place at an upstream, {threads} thread(s)"));
        let nanos = measure(&all, KEYS, Law::Uniform, threads, 9, 200);
        rows(&all.map(Contestant::name), &nanos);
        at_most("nanoseconds that overload protection adds to a request", nanos[3] - nanos[0], BAR);
        at_most("nanoseconds that it adds to one whose latency is measured", nanos[4] - nanos[0], BAR);
    }
}
