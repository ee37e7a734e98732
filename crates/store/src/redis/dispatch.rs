//! Dispatch of a shard request: sends it to the shard that has its slot, and retries while that is safe and there is
//! time.
//!
//! | answer | what happens |
//! |---|---|
//! | MOVED, ASK | sent to where it points; the slots are looked up again in the background |
//! | LOADING, CLUSTERDOWN, TRYAGAIN, READONLY, … | nothing was applied: retried until the deadline |
//! | no connection | retried once, because the connection may only have been stale |
//! | sent, and no reply | may have been applied: fails, never sent again |
//! | the deadline | fails immediately, whatever the connection does |

use super::pipeline::{Command, FailedJob, Failure, Job, ShardReply};
use super::shard::{ErrorKind, Shard, Shared};
use super::shard_request::ShardRequest;
use super::topology::Topology;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::oneshot;
use tokio::time::{Instant, timeout_at};
use tollgate_core::{Clock, LossPolicy, StoreError};

/// Why a shard request failed.
#[derive(Debug)]
pub(super) struct DispatchError {
    pub(super) error: StoreError,
}

impl From<StoreError> for DispatchError {
    fn from(error: StoreError) -> Self {
        Self { error }
    }
}

/// Pause between two attempts on a server that rejected a request.
const RETRY_PAUSE: Duration = Duration::from_millis(1);

/// Sends a shard request to its server and waits for the reply, until the deadline.
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
        let shard = match redirect.take() {
            Some(shard) => shard,
            None => match timeout_at(until, topology.shard_for_slot(slot)).await {
                Ok(Some(shard)) => shard,
                _ => {
                    return Err(
                        StoreError::Unavailable("the cluster's slots are not known".to_owned()).into()
                    );
                }
            },
        };
        let Some(guard) = shard.breaker.try_acquire(shared.clock.now()) else {
            shard.errors.count(ErrorKind::Open);
            return Err(unavailable(&shard, "too many failures; it is left alone for a while").into());
        };
        let (reply, answer) = oneshot::channel();
        let job = Job { command: work.clone(), request, slot, is_asking: std::mem::take(&mut asking), reply };
        if shard.send(job).is_err() {
            shard.errors.count(ErrorKind::Busy);
            shard.record_failure(guard, ErrorKind::Busy, shared.clock.now());
            return Err(unavailable(&shard, "too many checks wait for it").into());
        }
        let failed = match timeout_at(until, answer).await {
            Ok(Ok(Ok(answer))) => {
                shard.record_success(guard);
                shard.record_clock(answer.now, shared.clock.now());
                return Ok(answer);
            }
            Ok(Ok(Err(failed))) => failed,
            Ok(Err(_)) => return Err(unavailable(&shard, "its lane has ended").into()),
            Err(_) => {
                shard.errors.count(ErrorKind::Timeout);
                shard.record_failure(guard, ErrorKind::Timeout, shared.clock.now());
                topology.mark_stale();
                return Err(StoreError::Timeout.into());
            }
        };
        let FailedJob { failure: why, request: back } = failed;
        request = back;
        match why {
            Failure::Moved(address) => {
                shard.record_success(guard);
                topology.mark_stale();
                let target = topology.shard_at(&complete_address(&address, &shard.address));
                // A server without slots so far may be the successor of a failed one: charges with a loss policy wait
                // until that is known.
                let cares =
                    request.charges.iter().any(|want| want.loss_policy == LossPolicy::AssumeExhausted);
                if cares && timeout_at(until, topology.wait_for_slots(&target)).await.is_err() {
                    return Err(StoreError::Timeout.into());
                }
                redirect = Some(target);
            }
            Failure::Ask(address) => {
                shard.record_success(guard);
                asking = true;
                redirect = Some(topology.shard_at(&complete_address(&address, &shard.address)));
            }
            Failure::ClockMismatch(now) => {
                shard.record_success(guard);
                request.server_time = Some(now);
            }
            Failure::Unsent(why) => {
                shard.errors.count(ErrorKind::Connection);
                shard.record_failure(guard, ErrorKind::Connection, shared.clock.now());
                topology.mark_stale();
                unsent += 1;
                if unsent > 1 {
                    return Err(unavailable(&shard, &why).into());
                }
            }
            Failure::Lost(why) => {
                shard.errors.count(ErrorKind::Connection);
                shard.record_failure(guard, ErrorKind::Connection, shared.clock.now());
                topology.mark_stale();
                return Err(unavailable(&shard, &why).into());
            }
            Failure::Rejected(why) => {
                shard.errors.count(ErrorKind::Rejected);
                topology.mark_stale();
                if !is_transient(&why) || Instant::now() + RETRY_PAUSE >= until {
                    shard.record_failure(guard, ErrorKind::Rejected, shared.clock.now());
                    return Err(unavailable(&shard, &why).into());
                }
                drop(guard);
                tokio::time::sleep(RETRY_PAUSE).await;
            }
        }
        if Instant::now() >= until {
            return Err(StoreError::Timeout.into());
        }
    }
}

/// Returns whether a rejection may be transient.
fn is_transient(why: &str) -> bool {
    ["LOADING", "CLUSTERDOWN", "TRYAGAIN", "READONLY", "MASTERDOWN", "BUSY"]
        .iter()
        .any(|code| why.starts_with(code))
}

fn unavailable(shard: &Shard, why: &str) -> StoreError {
    StoreError::Unavailable(format!("{}: {why}", shard.address))
}

/// Returns the address, with the host of the redirecting server if it has none.
fn complete_address(address: &str, from: &str) -> String {
    match address.strip_prefix(':') {
        Some(port) => format!("{}:{port}", from.rsplit_once(':').map_or(from, |(host, _)| host)),
        None => address.to_owned(),
    }
}
