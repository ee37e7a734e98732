//! Which server to ask, and for how long, by the rules that Tollgate's clients in every language share
//! (`clients/conformance/README.md`, section Failover). Servers keep their configured order, so that one cluster's
//! counters are used as long as it answers; a server that faults moves back for a while. A random order was rejected:
//! with counters in memory each server has its own, and a caller would get several limits.

use smallvec::SmallVec;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

const COOLDOWN: Duration = Duration::from_secs(1);
const MAX_COOLDOWN: Duration = Duration::from_secs(30);

/// Servers in the order in which to ask them, by their index.
pub(crate) type Order = SmallVec<[usize; 4]>;

/// Returns the time for all attempts together: never more than the caller has.
pub(crate) fn total_time(own: Duration, callers: Option<Duration>) -> Duration {
    callers.map_or(own, |callers| own.min(callers))
}

/// Returns the time for the next attempt; `None` if the deadline has passed. The rest is shared by the servers that are
/// left, including the one to be asked.
pub(crate) fn attempt_time(deadline: Duration, elapsed: Duration, servers_left: usize) -> Option<Duration> {
    let left = deadline.checked_sub(elapsed).filter(|left| !left.is_zero())?;
    let share = left / u32::try_from(servers_left.max(1)).unwrap_or(u32::MAX);
    Some(share.max(Duration::from_millis(1)))
}

#[derive(Clone, Copy, Debug, Default)]
struct Health {
    /// Faults in a row.
    faults: u32,
    /// Time at which the server has its place in the order again.
    down_until: Duration,
}

/// The order of servers, by their recent faults. Times count from any fixed point.
#[derive(Debug)]
pub(crate) struct ServerOrder {
    health: Mutex<SmallVec<[Health; 4]>>,
    /// A server has faulted since its last answer; read without the lock.
    any_down: AtomicBool,
    count: usize,
}

impl ServerOrder {
    pub(crate) fn new(count: usize) -> Self {
        let health = Mutex::new(SmallVec::from_elem(Health::default(), count));
        Self { health, any_down: AtomicBool::new(false), count }
    }

    pub(crate) fn answered(&self, server: usize) {
        if self.any_down.load(Ordering::Relaxed) {
            let mut health = self.lock();
            health[server] = Health::default();
            self.any_down.store(health.iter().any(|one| one.faults > 0), Ordering::Relaxed);
        }
    }

    pub(crate) fn faulted(&self, server: usize, now: Duration) {
        let mut health = self.lock();
        let one = &mut health[server];
        let pause = COOLDOWN.saturating_mul(1 << one.faults.min(10)).min(MAX_COOLDOWN);
        *one = Health { faults: one.faults.saturating_add(1), down_until: now + pause };
        self.any_down.store(true, Ordering::Relaxed);
    }

    pub(crate) fn order(&self, now: Duration) -> Order {
        let mut order: Order = (0..self.count).collect();
        if self.any_down.load(Ordering::Relaxed) {
            let health = self.lock();
            // Stable: servers that are up keep their configured order, and so do those that return together.
            order.sort_by_key(|server| Some(health[*server].down_until).filter(|until| *until > now));
        }
        order
    }

    /// Returns the faults in a row of each server.
    #[cfg(test)]
    pub(crate) fn faults(&self) -> Vec<u32> {
        self.lock().iter().map(|health| health.faults).collect()
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, SmallVec<[Health; 4]>> {
        self.health.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conformance_cases::load_cases;
    use serde_json::Value;

    fn millis(value: &Value) -> Duration {
        Duration::from_millis(value.as_u64().expect("milliseconds"))
    }

    fn list<'a>(value: &'a Value, name: &str) -> &'a Vec<Value> {
        value[name].as_array().filter(|all| !all.is_empty()).unwrap_or_else(|| panic!("`{name}` has cases"))
    }

    /// The order decides whose counters are used: clients that differ count one caller twice.
    #[test]
    fn servers_are_asked_as_by_the_other_clients() {
        let data = load_cases("failover");
        assert_eq!(
            (COOLDOWN, MAX_COOLDOWN),
            (millis(&data["cooldown_ms"]), millis(&data["max_cooldown_ms"]))
        );
        for case in list(&data, "sequences") {
            let count = usize::try_from(case["servers"].as_u64().expect("a number")).expect("a number");
            let servers = ServerOrder::new(count);
            for step in list(case, "steps") {
                let server =
                    || usize::try_from(step["server"].as_u64().expect("a server")).expect("a number");
                match step["event"].as_str() {
                    Some("fault") => servers.faulted(server(), millis(&step["at_ms"])),
                    Some("ok") => servers.answered(server()),
                    Some("order") => {
                        let order = serde_json::json!(servers.order(millis(&step["at_ms"])).to_vec());
                        assert_eq!(order, step["expect"], "{}: {step}", case["name"]);
                    }
                    other => panic!("unknown event {other:?}"),
                }
            }
        }
    }

    #[test]
    fn a_caller_with_less_time_gets_its_answer_in_time() {
        for case in list(&load_cases("failover"), "deadlines") {
            // Rust's durations cannot be negative; a caller whose time is over has none left.
            let callers =
                case["caller_ms"].as_i64().map(|left| Duration::from_millis(left.max(0).unsigned_abs()));
            let total = total_time(millis(&case["own_ms"]), callers);
            assert_eq!(total, millis(&case["expect"]["deadline_ms"]), "{case}");
        }
    }

    #[test]
    fn the_deadline_is_shared_by_the_servers_left() {
        for case in list(&load_cases("failover"), "attempts") {
            let left = usize::try_from(case["servers_left"].as_u64().expect("a number")).expect("a number");
            let time = attempt_time(millis(&case["deadline_ms"]), millis(&case["elapsed_ms"]), left);
            let time = time.map(|time| u64::try_from(time.as_millis()).expect("a short time"));
            assert_eq!(serde_json::json!(time), case["expect"]["attempt_ms"], "{case}");
        }
    }
}
