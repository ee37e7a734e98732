//! Asks a second server if the first one takes long, and uses the answer that comes first
//! (`clients/conformance/README.md`, section Hedging). The slower answer's charge is given back, which is why hedged
//! requests are reservations. Canceling the slower request instead was rejected: whether its server had charged it
//! already would be unknown.

use crate::servers::Order;
use std::future::Future;
use std::time::Duration;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::time::{Instant, sleep_until};

/// How long a hedged request may take before its charge can no longer be given back.
pub(crate) const HEDGE_TTL: Duration = Duration::from_secs(10);

/// How a hedged request ended.
#[derive(Debug)]
pub(crate) enum Hedged<A, E> {
    /// The first answer, and its server.
    Answered(usize, A),
    /// Every server faulted; the last fault.
    Faulted(E),
    /// The deadline passed.
    TimedOut,
}

/// What each request needs after the caller has its answer, or has gone.
pub(crate) trait Exchange: Clone + Send + Sync + 'static {
    type Answer: Send;
    type Fault: Send;

    /// Asks a server. Late answers are awaited too.
    fn ask(&self, server: usize) -> impl Future<Output = Result<Self::Answer, Self::Fault>> + Send;

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

fn start<X: Exchange>(exchange: &X, server: usize, sender: &UnboundedSender<Received<X>>) {
    let (exchange, sender) = (exchange.clone(), sender.clone());
    tokio::spawn(async move {
        let answer = exchange.ask(server).await;
        if let Err(unsent) = sender.send((server, answer))
            && let (server, Ok(answer)) = unsent.0
        {
            exchange.discard(server, answer).await;
        }
    });
}

/// Asks the servers in order: the next one when `hedge_after` has passed, or when those under way have faulted.
pub(crate) async fn hedge<X: Exchange>(
    exchange: X,
    order: Order,
    hedge_after: Duration,
    deadline: Duration,
) -> Hedged<X::Answer, X::Fault> {
    let (sender, receiver) = unbounded_channel();
    let began = Instant::now();
    let (mut order, mut under_way, mut may_hedge) = (order.into_iter(), 0_u32, true);
    let mut answers = Answers { receiver, exchange };
    if let Some(server) = order.next() {
        start(&answers.exchange, server, &sender);
        under_way += 1;
    }
    loop {
        tokio::select! {
            biased;
            Some((server, answer)) = answers.receiver.recv() => match answer {
                Ok(answer) => return Hedged::Answered(server, answer),
                Err(fault) => {
                    under_way -= 1;
                    if let Some(server) = order.next() {
                        start(&answers.exchange, server, &sender);
                        under_way += 1;
                    } else if under_way == 0 {
                        return Hedged::Faulted(fault);
                    }
                }
            },
            () = sleep_until(began + deadline) => return Hedged::TimedOut,
            () = sleep_until(began + hedge_after), if may_hedge => {
                may_hedge = false;
                if under_way == 1 && let Some(server) = order.next() {
                    start(&answers.exchange, server, &sender);
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

        async fn discard(&self, server: usize, answer: Value) {
            if let Some(id) = answer["reservation"].as_str() {
                self.canceled.lock().expect("a lock").push(json!([server, id]));
            }
        }
    }

    /// No request is charged twice, whatever the servers do, and whatever language the client is in.
    #[tokio::test(start_paused = true)]
    async fn the_first_answer_counts_and_the_others_are_given_back() {
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
            };
            let ended = hedge(exchange.clone(), order, millis("hedge_after_ms"), millis("deadline_ms")).await;
            let at = u64::try_from(exchange.began.elapsed().as_millis()).expect("a short time");
            let winner = match ended {
                Hedged::Answered(server, _) => json!(server),
                Hedged::Faulted(()) | Hedged::TimedOut => Value::Null,
            };
            tokio::time::sleep(Duration::from_secs(1)).await;
            let got = json!({
                "sent": *exchange.sent.lock().expect("a lock"), "winner": winner, "at_ms": at,
                "canceled": *exchange.canceled.lock().expect("a lock"),
            });
            assert_eq!(got, case["expect"], "{}", case["name"]);
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
        };
        let (short, long) = (Duration::from_millis(3), Duration::from_millis(50));
        let asked = hedge(exchange.clone(), Order::from_slice(&[0]), short, long);
        tokio::time::timeout(Duration::from_millis(10), asked).await.expect_err("the caller goes first");
        tokio::time::sleep(Duration::from_secs(1)).await;
        assert_eq!(*exchange.canceled.lock().expect("a lock"), [json!([0, "r0"])]);
    }
}
