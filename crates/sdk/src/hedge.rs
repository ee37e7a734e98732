//! Asks a second server if the first one takes long, and uses the answer that comes first
//! (`clients/conformance/README.md`, section Hedging). The slower answer's charge is given back, which is why hedged
//! requests are reservations. Canceling the slower request instead was rejected: whether its server had charged it
//! already would be unknown.
//!
//! A denial waits for the request beside it: on one store, the charge of that one may be the reason. Hedges have the
//! budget of retries: when all servers are slow, a second request for each call would make them slower.

use crate::checks::{CheckReason, CheckResult, Fault};
use crate::hedge_after::{Ended, HedgeAfter, LatencyP95};
use crate::pace::RetryBudget;
use crate::servers::{Order, attempt_time};
use std::future::Future;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::time::{Instant, sleep_until};

/// How long a hedged request may take before its charge can no longer be given back.
pub(crate) const HEDGE_TTL: Duration = Duration::from_secs(10);

/// Bounds the hedges of one client to a tenth of its calls, and to ten at once.
#[derive(Debug, Default)]
pub(crate) struct HedgeBudget(Mutex<RetryBudget>);

impl HedgeBudget {
    fn lock(&self) -> MutexGuard<'_, RetryBudget> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    #[cfg(test)]
    pub(crate) fn balance(&self) -> u32 {
        self.lock().balance()
    }
}

/// When the calls of one client are hedged, and how many of them.
#[derive(Debug)]
pub(crate) struct Hedging {
    after: Option<HedgeAfter>,
    pub(crate) latency: LatencyP95,
    pub(crate) budget: HedgeBudget,
}

impl Hedging {
    pub(crate) fn new(after: Option<HedgeAfter>) -> Self {
        Self { after, latency: LatencyP95::default(), budget: HedgeBudget::default() }
    }

    /// Returns when to ask the next server; `None` without hedging.
    pub(crate) fn after(&self) -> Option<Duration> {
        Some(match self.after? {
            HedgeAfter::Fixed(after) => after,
            HedgeAfter::P95 => self.latency.get(),
        })
    }

    /// Records how long the first request of a call took, if that decides when to hedge.
    pub(crate) fn measured(&self, latency: Duration, ended: Ended) {
        if self.after == Some(HedgeAfter::P95) {
            self.latency.record(latency, ended);
        }
    }
}

/// How a hedged request ended.
#[derive(Debug)]
pub(crate) enum Hedged<A, E> {
    /// The answer that counts, and its server.
    Answered(usize, A),
    /// A denial, and its server. The request beside it did not answer: if its charge was the reason, the denial does not
    /// hold once that is given back.
    Unconfirmed(usize, A),
    /// Every server faulted; the last fault.
    Faulted(E),
    /// The deadline passed.
    TimedOut,
}

impl<A> Hedged<A, Fault> {
    /// Returns the answer that counts, and its server. `distrust` marks a denial that may not hold.
    pub(crate) fn into_result(self, distrust: impl FnOnce(&mut A)) -> Result<(usize, A), Fault> {
        match self {
            Self::Answered(server, answer) => Ok((server, answer)),
            Self::Unconfirmed(server, mut answer) => {
                distrust(&mut answer);
                Ok((server, answer))
            }
            Self::Faulted(fault) => Err(fault),
            Self::TimedOut => Err(Fault::Timeout),
        }
    }
}

/// What an answer means for the other requests of its call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    Allowed,
    /// A limit has no room, perhaps because of another request of the same call.
    Denied,
    /// Not allowed for another reason: shed, rejected, or a rule's fail policy.
    Failed,
}

impl Verdict {
    pub(crate) fn from_result(result: &CheckResult) -> Self {
        match result.reason {
            _ if result.is_allowed => Self::Allowed,
            CheckReason::Denied => Self::Denied,
            _ => Self::Failed,
        }
    }
}

/// What each request needs after the caller has its answer, or has gone.
pub(crate) trait Exchange: Clone + Send + Sync + 'static {
    type Answer: Send;
    type Fault: Send;

    /// Asks a server. Late answers are awaited too.
    fn ask(&self, server: usize) -> impl Future<Output = Result<Self::Answer, Self::Fault>> + Send;

    /// Returns what an answer means for the other requests.
    fn verdict(answer: &Self::Answer) -> Verdict;

    /// Records how long the first request took: also if it was slower than its hedge, or the caller has gone.
    fn measured(&self, latency: Duration, ended: Ended);

    /// Records that a server has used its share of the deadline. Its answer is still awaited.
    fn time_out(&self, server: usize);

    /// Gives back the charge of an answer that came too late.
    fn discard(&self, server: usize, answer: Self::Answer) -> impl Future<Output = ()> + Send;
}

type Received<X> = (usize, Result<<X as Exchange>::Answer, <X as Exchange>::Fault>);

/// Answers on their way. Those that have arrived when the caller is done are discarded on drop; later ones by their tasks,
/// which find the channel closed.
struct Answers<X: Exchange> {
    receiver: UnboundedReceiver<Received<X>>,
    exchange: X,
}

impl<X: Exchange> Drop for Answers<X> {
    fn drop(&mut self) {
        self.receiver.close();
        while let Ok((server, answer)) = self.receiver.try_recv() {
            if let Ok(answer) = answer {
                let exchange = self.exchange.clone();
                tokio::spawn(async move { exchange.discard(server, answer).await });
            }
        }
    }
}

/// The place of a request in its call.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Place {
    First,
    Later,
}

fn start<X: Exchange>(exchange: &X, server: usize, place: Place, sender: &UnboundedSender<Received<X>>) {
    let (exchange, sender) = (exchange.clone(), sender.clone());
    tokio::spawn(async move {
        let began = Instant::now();
        let answer = exchange.ask(server).await;
        if place == Place::First {
            exchange.measured(began.elapsed(), if answer.is_ok() { Ended::Answered } else { Ended::Faulted });
        }
        if let Err(unsent) = sender.send((server, answer))
            && let (server, Ok(answer)) = unsent.0
        {
            exchange.discard(server, answer).await;
        }
    });
}

/// Asks the servers in order: the next one when `hedge_after` has passed, or when those under way have faulted. Without
/// budget for that, the next one is asked when failover would ask it: after the first one's share of the deadline.
pub(crate) async fn hedge<X: Exchange>(
    exchange: X,
    order: Order,
    hedge_after: Duration,
    deadline: Duration,
    budget: &HedgeBudget,
) -> Hedged<X::Answer, X::Fault> {
    let (sender, receiver) = unbounded_channel();
    let began = Instant::now();
    let share = attempt_time(deadline, Duration::ZERO, order.len()).unwrap_or_default();
    let (mut ask_next_after, mut denial) = (Some(hedge_after.min(share)), None);
    let (mut order, mut under_way, mut last) = (order.into_iter(), 0_u32, None);
    let mut answers = Answers { receiver, exchange };
    budget.lock().deposit();
    if let Some(server) = order.next() {
        start(&answers.exchange, server, Place::First, &sender);
        last = Some(server);
        under_way += 1;
    }
    loop {
        tokio::select! {
            biased;
            Some((server, answer)) = answers.receiver.recv() => {
                under_way -= 1;
                match (answer, denial.take()) {
                    (Ok(answer), None) if under_way > 0 && X::verdict(&answer) == Verdict::Denied => {
                        denial = Some((server, answer));
                    }
                    (Ok(answer), Some((first, denied))) if X::verdict(&answer) != Verdict::Allowed => {
                        return Hedged::Answered(first, denied);
                    }
                    (Ok(answer), _) => return Hedged::Answered(server, answer),
                    (Err(_), Some((first, denied))) => return Hedged::Unconfirmed(first, denied),
                    (Err(fault), None) => {
                        if let Some(server) = order.next() {
                            start(&answers.exchange, server, Place::Later, &sender);
                            last = Some(server);
                            under_way += 1;
                        } else if under_way == 0 {
                            return Hedged::Faulted(fault);
                        }
                    }
                }
            }
            () = sleep_until(began + deadline) => return match denial {
                Some((server, denied)) => Hedged::Unconfirmed(server, denied),
                None => Hedged::TimedOut,
            },
            () = sleep_until(began + ask_next_after.unwrap_or(deadline)), if ask_next_after.is_some() => {
                let is_hedge = ask_next_after.take() < Some(share);
                if order.len() == 0 {
                    continue;
                }
                if is_hedge && !budget.lock().withdraw() {
                    ask_next_after = Some(share);
                } else if let Some(server) = order.next() {
                    // Only one request is under way: the last.
                    if let Some(slow) = last.filter(|_| !is_hedge) {
                        answers.exchange.time_out(slow);
                    }
                    start(&answers.exchange, server, Place::Later, &sender);
                    under_way += 1;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conformance_cases::load_cases;
    use serde_json::{Value, json};
    use std::sync::{Arc, Mutex};

    /// Servers of a case, in virtual time.
    #[derive(Clone)]
    struct Case {
        servers: Arc<Vec<Value>>,
        began: Instant,
        sent: Arc<Mutex<Vec<Value>>>,
        canceled: Arc<Mutex<Vec<Value>>>,
        timed_out: Arc<Mutex<Vec<usize>>>,
        measured: Arc<Mutex<Vec<(u64, Ended)>>>,
    }

    impl Exchange for Case {
        type Answer = Value;
        type Fault = ();

        async fn ask(&self, server: usize) -> Result<Value, ()> {
            let at = self.began.elapsed().as_millis();
            self.sent.lock().expect("a lock").push(json!([server, u64::try_from(at).expect("a short time")]));
            let asked = &self.servers[server];
            tokio::time::sleep(Duration::from_millis(asked["after_ms"].as_u64().expect("a time"))).await;
            if asked["answer"] == "fault" { Err(()) } else { Ok(asked.clone()) }
        }

        fn verdict(answer: &Value) -> Verdict {
            match answer["answer"].as_str() {
                Some("allowed") => Verdict::Allowed,
                Some("denied") => Verdict::Denied,
                _ => Verdict::Failed,
            }
        }

        fn measured(&self, latency: Duration, ended: Ended) {
            let millis = u64::try_from(latency.as_millis()).expect("a short time");
            self.measured.lock().expect("a lock").push((millis, ended));
        }

        fn time_out(&self, server: usize) {
            self.timed_out.lock().expect("a lock").push(server);
        }

        async fn discard(&self, server: usize, answer: Value) {
            if let Some(id) = answer["reservation"].as_str() {
                self.canceled.lock().expect("a lock").push(json!([server, id]));
            }
        }
    }

    fn budget_of(balance: u64) -> HedgeBudget {
        let budget = HedgeBudget::default();
        while budget.lock().withdraw() {}
        while u64::from(budget.balance()) < balance {
            budget.lock().deposit();
        }
        budget
    }

    /// No request is charged twice or denied because of its own hedge, and slow servers get hardly more requests than others,
    /// whatever language the client is in.
    #[tokio::test(start_paused = true)]
    async fn requests_are_hedged_as_by_the_other_clients() {
        let data = load_cases("hedging");
        for case in data["cases"].as_array().filter(|cases| !cases.is_empty()).expect("cases") {
            let servers = case["servers"].as_array().expect("servers").clone();
            let order: Order = (0..servers.len()).collect();
            let millis = |name: &str| Duration::from_millis(case[name].as_u64().expect("a time"));
            let exchange = Case {
                servers: Arc::new(servers),
                began: Instant::now(),
                sent: Arc::default(),
                canceled: Arc::default(),
                timed_out: Arc::default(),
                measured: Arc::default(),
            };
            let budget = budget_of(case["budget"].as_u64().expect("a balance"));
            let (after, deadline) = (millis("hedge_after_ms"), millis("deadline_ms"));
            let ended = hedge(exchange.clone(), order, after, deadline, &budget).await;
            let at = u64::try_from(exchange.began.elapsed().as_millis()).expect("a short time");
            let (winner, is_cacheable) = match ended {
                Hedged::Answered(server, answer) => (json!(server), answer["answer"] == "denied"),
                Hedged::Unconfirmed(server, _) => (json!(server), false),
                Hedged::Faulted(()) | Hedged::TimedOut => (Value::Null, false),
            };
            tokio::time::sleep(Duration::from_secs(1)).await;
            let got = json!({
                "sent": *exchange.sent.lock().expect("a lock"), "winner": winner, "at_ms": at,
                "canceled": *exchange.canceled.lock().expect("a lock"), "cacheable": is_cacheable,
                "budget": budget.balance(), "timed_out": *exchange.timed_out.lock().expect("a lock"),
            });
            assert_eq!(got, case["expect"], "{}", case["name"]);
            // The first request is measured whatever became of its call.
            let first = &exchange.servers[0];
            let ended = if first["answer"] == "fault" { Ended::Faulted } else { Ended::Answered };
            let took = first["after_ms"].as_u64().expect("a time");
            assert_eq!(*exchange.measured.lock().expect("a lock"), [(took, ended)], "{}", case["name"]);
        }
    }

    /// A caller that has gone has no use for its answer: what it was charged is given back.
    #[tokio::test(start_paused = true)]
    async fn answers_to_a_caller_that_has_gone_are_given_back() {
        let servers = vec![json!({"after_ms": 20, "answer": "allowed", "reservation": "r0"})];
        let exchange = Case {
            servers: Arc::new(servers),
            began: Instant::now(),
            sent: Arc::default(),
            canceled: Arc::default(),
            timed_out: Arc::default(),
            measured: Arc::default(),
        };
        let budget = HedgeBudget::default();
        let (short, long) = (Duration::from_millis(3), Duration::from_millis(50));
        let asked = hedge(exchange.clone(), Order::from_slice(&[0]), short, long, &budget);
        tokio::time::timeout(Duration::from_millis(10), asked).await.expect_err("the caller goes first");
        tokio::time::sleep(Duration::from_secs(1)).await;
        assert_eq!(*exchange.canceled.lock().expect("a lock"), [json!([0, "r0"])]);
        assert_eq!(*exchange.measured.lock().expect("a lock"), [(20, Ended::Answered)]);
    }
}
