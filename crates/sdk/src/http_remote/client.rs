//! Which server is asked, and when: one after the other, or two at a time for hedged requests.

use super::transport::Transport;
use crate::checks::{Answer, Closed, Fault, read_check, read_closed};
use crate::hedge::{Exchange, HEDGE_TTL, Hedging, Verdict};
use crate::hedge_after::Ended;
use crate::servers::{ServerOrder, attempt_time};
use bytes::Bytes;
use http::{HeaderMap, HeaderValue};
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;

/// The servers, and in which order to ask them.
#[derive(Debug)]
pub(super) struct Client {
    pub(super) transport: Transport,
    pub(super) order: ServerOrder,
    pub(super) hedging: Hedging,
    /// The time that `order` counts from.
    pub(super) began: Instant,
}

/// A server's answer, with the fields of its response.
#[derive(Clone, Debug)]
pub(super) struct Answered {
    pub(super) answer: Answer,
    pub(super) headers: HeaderMap,
}

/// A request to any of the servers.
#[derive(Clone, Debug)]
pub(super) struct Call {
    pub(super) client: Arc<Client>,
    pub(super) path: &'static str,
    pub(super) body: Bytes,
    pub(super) traceparent: Option<HeaderValue>,
}

impl Call {
    /// Asks one server, and remembers whether it could be used.
    async fn ask_within(&self, server: usize, within: Duration) -> Result<Answered, Fault> {
        let Client { transport, order, began, .. } = &*self.client;
        let sent = transport.post(server, self.path, self.body.clone(), self.traceparent.as_ref(), within);
        let answered = sent.await.and_then(|response| {
            let answer = read_check(response.status, &response.body)?;
            Ok(Answered { answer, headers: response.headers })
        });
        match &answered {
            Ok(_) => order.answered(server),
            Err(_) => order.faulted(server, began.elapsed()),
        }
        answered
    }

    /// Asks one server after the other until one answers.
    pub(super) async fn in_turn(&self, deadline: Duration) -> Result<(usize, Answered), Fault> {
        let order = self.client.order.order(self.client.began.elapsed());
        let began = Instant::now();
        let mut last = Fault::Timeout;
        for (asked, server) in order.iter().enumerate() {
            let Some(within) = attempt_time(deadline, began.elapsed(), order.len() - asked) else { break };
            match self.ask_within(*server, within).await {
                Ok(answered) => return Ok((*server, answered)),
                Err(fault) => last = fault,
            }
        }
        Err(last)
    }
}

/// A hedged request: a reservation at each server that is asked, of which all but one are canceled.
impl Exchange for Call {
    type Answer = Answered;
    type Fault = Fault;

    fn ask(&self, server: usize) -> impl Future<Output = Result<Answered, Fault>> + Send {
        self.ask_within(server, HEDGE_TTL)
    }

    fn verdict(answered: &Answered) -> Verdict {
        Verdict::from_result(&answered.answer.result)
    }

    fn measured(&self, latency: Duration, ended: Ended) {
        self.client.hedging.measured(latency, ended);
    }

    fn time_out(&self, server: usize) {
        self.client.order.faulted(server, self.client.began.elapsed());
    }

    async fn discard(&self, server: usize, answered: Answered) {
        let Some(id) = answered.answer.reservation else { return };
        if let Closed::Fault(fault) = self.client.close(server, &Closing::Cancel(&id), HEDGE_TTL).await {
            tracing::debug!(%fault, "the charge of a hedged request was not given back");
        }
    }
}

/// How to close a reservation.
pub(super) enum Closing<'a> {
    Settle(&'a str, u64),
    Cancel(&'a str),
}

impl Client {
    /// Closes a reservation at the server that made it.
    pub(super) async fn close(&self, server: usize, closing: &Closing<'_>, within: Duration) -> Closed {
        let (path, body) = match closing {
            Closing::Settle(id, cost) => ("/v1/settle", serde_json::json!({"reservation": id, "cost": cost})),
            Closing::Cancel(id) => ("/v1/cancel", serde_json::json!({"reservation": id})),
        };
        match self.transport.post(server, path, body.to_string().into(), None, within).await {
            Ok(response) => read_closed(response.status, &response.body),
            Err(fault) => Closed::Fault(fault),
        }
    }
}
