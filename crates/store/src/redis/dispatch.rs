//! Dispatch of a shard request: sends it to the shard that has its slot, and retries while that is safe and there is
//! time.
//!
//! | answer | what happens |
//! |---|---|
//! | MOVED, ASK | sent to where it points; the slots are looked up again in the background |
//! | LOADING, CLUSTERDOWN, TRYAGAIN, READONLY, … | nothing was applied: retried until the deadline |
//! | no connection | retried once, because the connection may only have been stale |
//! | a connection lost after sending | may have been applied: fails, never sent again |
//! | the deadline | fails immediately, whatever the connection does; a late reply is reconciled |
//! | a key that holds something else | fails, and concerns this request alone |

use super::RedisStore;
use super::health::ErrorKind;
use super::late_replies::{Counters, ReplyWaiter};
use super::pipeline::{Command, FailedJob, Failure, Job, ShardReply};
use super::shard::Shard;
use super::shard_request::ShardRequest;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::oneshot;
use tokio::time::{Instant, timeout_at};
use tollgate_core::{Clock, LossPolicy, StoreError};

/// Pause between two attempts on a server that rejected a request.
const RETRY_PAUSE: Duration = Duration::from_millis(1);

/// A deadline noticed later than this was missed by this process, not by the server.
const UNNOTICED: Duration = Duration::from_micros(1_500);

/// Sends a shard request to its server and waits for the reply, until the deadline. With `counters`, a reply after the
/// deadline is reported to the holder of the error, or the charge is undone.
pub(super) async fn send_with_retry(
    store: &RedisStore,
    work: Command,
    slot: u16,
    mut request: Box<ShardRequest>,
    until: Instant,
    counters: Option<Counters<'_>>,
) -> Result<ShardReply, StoreError> {
    let RedisStore { shared, topology, .. } = store;
    let (mut redirect, mut asking, mut unsent): (Option<Arc<Shard>>, bool, u32) = (None, false, 0);
    loop {
        let shard = match redirect.take() {
            Some(shard) => shard,
            None => match timeout_at(until, topology.shard_for_slot(slot)).await {
                Ok(Some(shard)) => shard,
                _ => {
                    return Err(StoreError::Unavailable("the cluster's slots are not known".to_owned()));
                }
            },
        };
        if shard.health.is_open() {
            return Err(left_alone(store, &shard));
        }
        let (reply, receiver) = oneshot::channel();
        let (id, is_asking) = (shared.late.next_id(), std::mem::take(&mut asking));
        let job = Job { id, command: work.clone(), request, slot, is_asking, reply };
        if shard.send(job).is_err() {
            shard.health.count(ErrorKind::Busy);
            return Err(unavailable(&shard, "too many checks wait for it"));
        }
        let waiter =
            ReplyWaiter { receiver, id, slot, command: work.clone(), store, counters: counters.clone() };
        let replied = match wait(waiter, until, shared.config.deadline).await {
            Ok(replied) => replied,
            Err(error) => {
                shard.health.record_late();
                topology.mark_stale();
                return Err(error);
            }
        };
        let FailedJob { failure: why, request: back } = match replied {
            Ok(answer) => {
                shard.health.record_in_time();
                shard.record_clock(answer.now, shared.clock.now());
                return Ok(answer);
            }
            Err(failed) => failed,
        };
        request = back;
        match why {
            Failure::Moved(address) => {
                topology.mark_stale();
                let target = topology.shard_at(&complete_address(&address, &shard.address));
                // A server without slots so far may be the successor of a failed one: charges with a loss policy wait
                // until that is known.
                let cares =
                    request.charges.iter().any(|want| want.loss_policy == LossPolicy::AssumeExhausted);
                if cares && timeout_at(until, topology.wait_for_slots(&target)).await.is_err() {
                    return Err(StoreError::Timeout);
                }
                redirect = Some(target);
            }
            Failure::Ask(address) => {
                asking = true;
                redirect = Some(topology.shard_at(&complete_address(&address, &shard.address)));
            }
            Failure::ClockMismatch(now) => request.server_time = Some(now),
            Failure::Unsent(why) => {
                shard.health.count(ErrorKind::Connection);
                topology.mark_stale();
                unsent += 1;
                if unsent > 1 {
                    return Err(unavailable(&shard, &why));
                }
            }
            Failure::Lost(why) => {
                shard.health.count(ErrorKind::Connection);
                topology.mark_stale();
                return Err(match work {
                    Command::Debit => StoreError::Lost(format!("{}: {why}", shard.address)),
                    _ => unavailable(&shard, &why),
                });
            }
            Failure::Damaged(why) => {
                shard.health.count(ErrorKind::Damaged);
                return Err(unavailable(&shard, &why));
            }
            Failure::Rejected(why) => {
                shard.health.count_refusal(&why);
                topology.mark_stale();
                if !why.is_transient() || Instant::now() + RETRY_PAUSE >= until {
                    return Err(unavailable(&shard, &why.to_string()));
                }
                tokio::time::sleep(RETRY_PAUSE).await;
            }
        }
        if Instant::now() >= until {
            return Err(StoreError::Timeout);
        }
    }
}

/// Waits for the reply until the deadline. If this process notices the deadline late, because it did not run, the reply
/// may be here already and only needs to be read: it gets the time that was lost.
async fn wait(
    mut waiter: ReplyWaiter<'_>,
    until: Instant,
    deadline: Duration,
) -> Result<Result<ShardReply, FailedJob>, StoreError> {
    let mut received = timeout_at(until, &mut waiter.receiver).await;
    let late_by = Instant::now() - until;
    if received.is_err() && late_by > UNNOTICED {
        received = timeout_at(until + late_by + late_by.min(deadline), &mut waiter.receiver).await;
    }
    match received {
        Ok(Ok(reply)) => {
            waiter.counters = None;
            Ok(reply)
        }
        Ok(Err(_)) => {
            waiter.counters = None;
            Err(StoreError::Unavailable("its pipeline has ended".to_owned()))
        }
        Err(_) => {
            waiter.abandon().map_or_else(|late| Err(late.map_or(StoreError::Timeout, StoreError::Late)), Ok)
        }
    }
}

/// Returns the error of a request that is not sent, because the shard's breaker is open.
pub(super) fn left_alone(store: &RedisStore, shard: &Shard) -> StoreError {
    shard.health.count(ErrorKind::Open);
    store.topology.mark_stale();
    unavailable(shard, "too many failures; it is left alone for a while")
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
