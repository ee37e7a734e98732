//! Dispatch of a shard request: sends it to the shard that has its slot, and retries while that is safe and there is
//! time.
//!
//! | answer | what happens |
//! |---|---|
//! | MOVED, ASK | sent to where it points; the slots are looked up again in the background |
//! | LOADING, CLUSTERDOWN, TRYAGAIN, READONLY, … | nothing was done: asked again until the deadline |
//! | no connection | asked once more, for a connection may only have been stale |
//! | sent, and no answer | it may have been done: failed, never sent again |
//! | the deadline | failed at once, whatever the connection does |

use super::pipeline::{Command, FailedJob, Failure, Job, ShardReply};
use super::shard::{ErrorKind, Shard, Shared};
use super::shard_request::ShardRequest;
use super::topology::Topology;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::oneshot;
use tokio::time::{Instant, timeout_at};
use tollgate_core::{Clock, LossPolicy, StoreError};

/// Why a part was not answered.
#[derive(Debug)]
pub(super) struct DispatchError {
    pub(super) error: StoreError,
}

impl From<StoreError> for DispatchError {
    fn from(error: StoreError) -> Self {
        Self { error }
    }
}

/// Between two tries of a server that refused.
const RETRY_PAUSE: Duration = Duration::from_millis(1);

/// Sends a part to its server and waits for the answer, until the deadline.
pub(super) async fn send_with_retry(
    shared: &Arc<Shared>,
    topology: &Arc<Topology>,
    work: Command,
    slot: u16,
    request: ShardRequest,
    until: Instant,
) -> Result<ShardReply, DispatchError> {
    let mut request = Box::new(request);
    let (mut redirect, mut asking, mut unsent): (Option<Arc<Shard>>, bool, u32) = (None, false, 0);
    loop {
        let node = match redirect.take() {
            Some(node) => node,
            None => match timeout_at(until, topology.shard_for_slot(slot)).await {
                Ok(Some(node)) => node,
                _ => {
                    return Err(
                        StoreError::Unavailable("the cluster's slots are not known".to_owned()).into()
                    );
                }
            },
        };
        let Some(ticket) = node.breaker.try_acquire(shared.clock.now()) else {
            node.errors.count(ErrorKind::Open);
            return Err(unavailable(&node, "too many failures; it is left alone for a while").into());
        };
        let (reply, answer) = oneshot::channel();
        let job = Job { command: work.clone(), request, slot, is_asking: std::mem::take(&mut asking), reply };
        if node.send(job).is_err() {
            node.errors.count(ErrorKind::Busy);
            node.record_failure(ticket, ErrorKind::Busy, shared.clock.now());
            return Err(unavailable(&node, "too many checks wait for it").into());
        }
        let failed = match timeout_at(until, answer).await {
            Ok(Ok(Ok(answer))) => {
                node.record_success(ticket);
                node.record_clock(answer.now, shared.clock.now());
                return Ok(answer);
            }
            Ok(Ok(Err(failed))) => failed,
            Ok(Err(_)) => return Err(unavailable(&node, "its lane has ended").into()),
            Err(_) => {
                node.errors.count(ErrorKind::Timeout);
                node.record_failure(ticket, ErrorKind::Timeout, shared.clock.now());
                topology.mark_stale();
                return Err(StoreError::Timeout.into());
            }
        };
        let FailedJob { failure: why, request: back } = failed;
        request = back;
        match why {
            Failure::Moved(address) => {
                node.record_success(ticket);
                topology.mark_stale();
                let target = topology.shard_at(&complete_address(&address, &node.address));
                // A server without slots so far may be the heir of one that failed: whoever cares waits to hear.
                let cares =
                    request.charges.iter().any(|want| want.loss_policy == LossPolicy::AssumeExhausted);
                if cares && timeout_at(until, topology.wait_for_slots(&target)).await.is_err() {
                    return Err(StoreError::Timeout.into());
                }
                redirect = Some(target);
            }
            Failure::Ask(address) => {
                node.record_success(ticket);
                asking = true;
                redirect = Some(topology.shard_at(&complete_address(&address, &node.address)));
            }
            Failure::ClockMismatch(now) => {
                node.record_success(ticket);
                request.server_time = Some(now);
            }
            Failure::Unsent(why) => {
                node.errors.count(ErrorKind::Connection);
                node.record_failure(ticket, ErrorKind::Connection, shared.clock.now());
                topology.mark_stale();
                unsent += 1;
                if unsent > 1 {
                    return Err(unavailable(&node, &why).into());
                }
            }
            Failure::Lost(why) => {
                node.errors.count(ErrorKind::Connection);
                node.record_failure(ticket, ErrorKind::Connection, shared.clock.now());
                topology.mark_stale();
                return Err(unavailable(&node, &why).into());
            }
            Failure::Rejected(why) => {
                node.errors.count(ErrorKind::Rejected);
                topology.mark_stale();
                if !is_transient(&why) || Instant::now() + RETRY_PAUSE >= until {
                    node.record_failure(ticket, ErrorKind::Rejected, shared.clock.now());
                    return Err(unavailable(&node, &why).into());
                }
                drop(ticket);
                tokio::time::sleep(RETRY_PAUSE).await;
            }
        }
        if Instant::now() >= until {
            return Err(StoreError::Timeout.into());
        }
    }
}

/// Whether a refusal may be over in a moment.
fn is_transient(why: &str) -> bool {
    ["LOADING", "CLUSTERDOWN", "TRYAGAIN", "READONLY", "MASTERDOWN", "BUSY"]
        .iter()
        .any(|code| why.starts_with(code))
}

fn unavailable(node: &Shard, why: &str) -> StoreError {
    StoreError::Unavailable(format!("{}: {why}", node.address))
}

/// An address with the host of the server that named it, where it names none.
fn complete_address(address: &str, from: &str) -> String {
    match address.strip_prefix(':') {
        Some(port) => format!("{}:{port}", from.rsplit_once(':').map_or(from, |(host, _)| host)),
        None => address.to_owned(),
    }
}
