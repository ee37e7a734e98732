//! One part of a request: sent to the server that has its slot, and sent again while that is safe and there is time.
//!
//! | answer | what happens |
//! |---|---|
//! | MOVED, ASK | sent to where it points; the slots are looked up again in the background |
//! | LOADING, CLUSTERDOWN, TRYAGAIN, READONLY, … | nothing was done: asked again until the deadline |
//! | no connection | asked once more, for a connection may only have been stale |
//! | sent, and no answer | it may have been done: failed, never sent again |
//! | the deadline | failed at once, whatever the connection does |

use super::pipeline::{Answer, Failed, Failure, Job, Work};
use super::shard::{Node, Shared, Trouble};
use super::shard_request::Request;
use super::topology::Topology;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::oneshot;
use tokio::time::{Instant, timeout_at};
use tollgate_core::{Clock, LossPolicy, StoreError};

/// Why a part was not answered.
#[derive(Debug)]
pub(super) struct Asked {
    pub(super) error: StoreError,
}

impl From<StoreError> for Asked {
    fn from(error: StoreError) -> Self {
        Self { error }
    }
}

/// Between two tries of a server that refused.
const PAUSE: Duration = Duration::from_millis(1);

/// Sends a part to its server and waits for the answer, until the deadline.
pub(super) async fn ask(
    shared: &Arc<Shared>,
    topology: &Arc<Topology>,
    work: Work,
    slot: u16,
    request: Request,
    until: Instant,
) -> Result<Answer, Asked> {
    let mut request = Box::new(request);
    let (mut redirect, mut asking, mut unsent): (Option<Arc<Node>>, bool, u32) = (None, false, 0);
    loop {
        let node = match redirect.take() {
            Some(node) => node,
            None => match timeout_at(until, topology.of(slot)).await {
                Ok(Some(node)) => node,
                _ => {
                    return Err(
                        StoreError::Unavailable("the cluster's slots are not known".to_owned()).into()
                    );
                }
            },
        };
        let Some(ticket) = node.breaker.admit(shared.clock.now()) else {
            node.errors.count(Trouble::Open);
            return Err(unavailable(&node, "too many failures; it is left alone for a while").into());
        };
        let (reply, answer) = oneshot::channel();
        let job = Job { work: work.clone(), request, slot, asking: std::mem::take(&mut asking), reply };
        if node.send(job).is_err() {
            node.errors.count(Trouble::Busy);
            node.failed(ticket, Trouble::Busy, shared.clock.now());
            return Err(unavailable(&node, "too many checks wait for it").into());
        }
        let failed = match timeout_at(until, answer).await {
            Ok(Ok(Ok(answer))) => {
                node.answered(ticket);
                node.shows(answer.now, shared.clock.now());
                return Ok(answer);
            }
            Ok(Ok(Err(failed))) => failed,
            Ok(Err(_)) => return Err(unavailable(&node, "its lane has ended").into()),
            Err(_) => {
                node.errors.count(Trouble::Timeout);
                node.failed(ticket, Trouble::Timeout, shared.clock.now());
                topology.suspect();
                return Err(StoreError::Timeout.into());
            }
        };
        let Failed { why, request: back } = failed;
        request = back;
        match why {
            Failure::Moved(address) => {
                node.answered(ticket);
                topology.suspect();
                let target = topology.at(&whole(&address, &node.address));
                // A server without slots so far may be the heir of one that failed: whoever cares waits to hear.
                let cares = request.wants.iter().any(|want| want.after_loss == LossPolicy::AssumeExhausted);
                if cares && timeout_at(until, topology.serves(&target)).await.is_err() {
                    return Err(StoreError::Timeout.into());
                }
                redirect = Some(target);
            }
            Failure::Ask(address) => {
                node.answered(ticket);
                asking = true;
                redirect = Some(topology.at(&whole(&address, &node.address)));
            }
            Failure::Elsewhen(now) => {
                node.answered(ticket);
                request.near = Some(now);
            }
            Failure::Unsent(why) => {
                node.errors.count(Trouble::Connection);
                node.failed(ticket, Trouble::Connection, shared.clock.now());
                topology.suspect();
                unsent += 1;
                if unsent > 1 {
                    return Err(unavailable(&node, &why).into());
                }
            }
            Failure::Lost(why) => {
                node.errors.count(Trouble::Connection);
                node.failed(ticket, Trouble::Connection, shared.clock.now());
                topology.suspect();
                return Err(unavailable(&node, &why).into());
            }
            Failure::Refused(why) => {
                node.errors.count(Trouble::Refused);
                topology.suspect();
                if !passes(&why) || Instant::now() + PAUSE >= until {
                    node.failed(ticket, Trouble::Refused, shared.clock.now());
                    return Err(unavailable(&node, &why).into());
                }
                drop(ticket);
                tokio::time::sleep(PAUSE).await;
            }
        }
        if Instant::now() >= until {
            return Err(StoreError::Timeout.into());
        }
    }
}

/// Whether a refusal may be over in a moment.
fn passes(why: &str) -> bool {
    ["LOADING", "CLUSTERDOWN", "TRYAGAIN", "READONLY", "MASTERDOWN", "BUSY"]
        .iter()
        .any(|code| why.starts_with(code))
}

fn unavailable(node: &Node, why: &str) -> StoreError {
    StoreError::Unavailable(format!("{}: {why}", node.address))
}

/// An address with the host of the server that named it, where it names none.
fn whole(address: &str, from: &str) -> String {
    match address.strip_prefix(':') {
        Some(port) => format!("{}:{port}", from.rsplit_once(':').map_or(from, |(host, _)| host)),
        None => address.to_owned(),
    }
}
