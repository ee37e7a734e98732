//! Pipeline: one connection to one shard, and the requests queued for it.
//!
//! Requests that arrive while a batch is in flight join the next one: no fixed batch size. The next batch is sent when
//! the one before it has been answered, or after a millisecond: on a link that is longer than that, batches overlap, so a
//! check takes one round trip however long it is. A batch is one pipeline of script calls; all requests of a batch whose
//! keys live together are one call, which reads its bundles once, decides the requests in order, and writes each bundle
//! once. Requests wait on their own deadlines, never on the connection: one that was canceled before the batch is sent is
//! left out.
//!
//! A batch past the deadline is one failure of the server, and its reply is still waited for: an answer, however late, is
//! a sign of life, and shows whether the requests were charged. A batch whose connection is lost is never sent again: its
//! charges may have been applied.
//!
//! The pipeline connects in the background, also while its server's breaker is open: that connection is the probe.

use super::health::Health;
use super::late_replies::LateReplies;
use super::probe::charge_probe;
use super::recompute::RecomputedOutcome;
use super::script_call::{CallResult, ScriptCall};
use super::server_error::ServerError;
use super::shard::{RunIdTracker, Shared};
use super::shard_request::ShardRequest;
use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use redis::aio::MultiplexedConnection;
use smallvec::SmallVec;
use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::error::Elapsed;
use tokio::time::{Instant, MissedTickBehavior, timeout_at};
use tollgate_core::{Admission, Clock, Timestamp};

/// The command that a server executes.
#[derive(Clone, Debug)]
pub(super) enum Command {
    Charge,
    Debit,
    Release,
    /// Undo what was taken at `taken_at`, given the bundles' prior contents.
    Undo {
        taken_at: Timestamp,
        priors: Vec<Vec<u8>>,
    },
    /// Return units taken ahead at `taken_at`; the last of the request's bundles marks that they were returned.
    ReturnUnits {
        taken_at: Timestamp,
        full_at: Timestamp,
    },
}

/// A request that waits for a reply.
pub(super) struct Job {
    /// Identifies the request if its caller no longer waits for the reply.
    pub(super) id: u64,
    pub(super) command: Command,
    pub(super) request: Box<ShardRequest>,
    pub(super) slot: u16,
    /// The slot is being migrated to this server: `ASKING` must be sent first.
    pub(super) is_asking: bool,
    pub(super) reply: oneshot::Sender<Result<ShardReply, FailedJob>>,
}

/// The reply of a server.
#[derive(Debug)]
pub(super) struct ShardReply {
    pub(super) now: Timestamp,
    pub(super) admission: Admission,
    pub(super) outcomes: SmallVec<[RecomputedOutcome; 4]>,
    /// Prior contents of the bundles, if an undo needs them.
    pub(super) priors: Vec<Vec<u8>>,
    /// The request, with the data loss that was assumed.
    pub(super) request: Box<ShardRequest>,
}

/// Why there is no reply, and the request for a retry.
#[derive(Debug)]
pub(super) struct FailedJob {
    pub(super) failure: Failure,
    pub(super) request: Box<ShardRequest>,
}

/// Why there is no reply.
#[derive(Clone, Debug)]
pub(super) enum Failure {
    /// The slot has moved to this address.
    Moved(String),
    /// The slot is being migrated to this address, and the key may be there.
    Ask(String),
    /// The server rejected the request before applying any of it.
    Rejected(ServerError),
    /// A key of the request cannot be read as counters; nothing was applied.
    Damaged(String),
    /// The request was never sent.
    Unsent(String),
    /// This node's calendar windows were too far from this server time.
    ClockMismatch(Timestamp),
    /// Sent without a reply: it may have been applied.
    Lost(String),
}

/// Opens a connection of a pipeline. The address is for status and logs.
pub(super) type Connect = Arc<
    dyn Fn() -> Pin<Box<dyn Future<Output = redis::RedisResult<MultiplexedConnection>> + Send>> + Send + Sync,
>;

/// Everything a pipeline needs.
pub(super) struct Pipeline {
    pub(super) connect: Connect,
    pub(super) shared: Arc<Shared>,
    pub(super) health: Arc<Health>,
    /// What this server may have lost.
    pub(super) run_id: Arc<RunIdTracker>,
    /// Whether requests of different slots may share a call.
    pub(super) merges: bool,
    /// Open connections to this server.
    pub(super) connected: Arc<AtomicUsize>,
}

/// Interval between checks of an idle connection.
const IDLE_CHECK: Duration = Duration::from_secs(2);

/// Maximum number of requests in one batch.
const MAX_BATCH: usize = 128;

/// How long a batch must have been in flight before the next one is sent beside it. On a short link replies come sooner,
/// so that requests gather into few calls; on a long one a request waits no longer than this for its batch.
const OVERLAP: Duration = Duration::from_millis(1);

/// Maximum number of requests in flight on one connection; further ones are queued.
const MAX_IN_FLIGHT: usize = 4_096;

/// How long a late reply is waited for, on a connection that is otherwise no longer used.
const PATIENCE: Duration = Duration::from_secs(60);

/// The connection of a pipeline.
enum Link<'a> {
    /// None; the next attempt is due.
    Down,
    Opening(Pin<Box<dyn Future<Output = Result<MultiplexedConnection, Failure>> + Send + 'a>>),
    Up(MultiplexedConnection),
}

/// The end of a batch.
struct Flight {
    /// The connection it was sent on.
    epoch: u64,
    jobs: usize,
    bytes: usize,
    link: LinkState,
}

/// What a batch has shown about its connection.
#[derive(Clone, Copy, PartialEq, Eq)]
enum LinkState {
    Usable,
    /// The server is not the primary.
    WrongServer,
    Lost,
}

/// The present connection. What is in flight on earlier ones no longer counts.
#[derive(Default)]
struct Present {
    epoch: u64,
    flights: usize,
    /// Requests in flight, and their bytes.
    jobs: usize,
    bytes: usize,
    /// When a flight was last answered, or the first of them was sent.
    last_reply: Option<Instant>,
}

impl Pipeline {
    /// Serves jobs until all senders are dropped.
    pub(super) async fn run(self, mut jobs: mpsc::Receiver<Job>) {
        let this = &self;
        let mut link = Link::Opening(this.opening());
        let mut flights = FuturesUnordered::new();
        let mut present = Present::default();
        let mut batch: Vec<Job> = Vec::with_capacity(MAX_BATCH);
        let mut changes = self.health.changes();
        let mut looks = tokio::time::interval(IDLE_CHECK);
        looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        // One timer for what is waited for: another batch beside those in flight, or another attempt to connect.
        let mut timer = pin!(tokio::time::sleep(Duration::ZERO));
        let (mut may_overlap, mut attempts) = (true, 0);
        // Of all connections so far: a late reply may take a minute. If earlier ones take the room of the present one,
        // nobody waits for them any longer.
        let (mut bytes_in_flight, most_bytes) = (0, self.shared.config.in_flight_bytes);
        let (oldest, _) = watch::channel(0);
        loop {
            let has_room = bytes_in_flight < most_bytes;
            if !has_room && present.bytes < most_bytes / 2 {
                oldest.send_replace(present.epoch);
            }
            let accepts = match &link {
                Link::Up(_) => {
                    has_room && (present.flights == 0 || may_overlap) && present.jobs < MAX_IN_FLIGHT
                }
                Link::Opening(_) => batch.len() < MAX_BATCH,
                Link::Down => true,
            };
            let (is_up, is_down) = (matches!(link, Link::Up(_)), matches!(link, Link::Down));
            let is_idle = is_up && present.flights == 0;
            tokio::select! {
                biased;
                Some(flight) = flights.next(), if !flights.is_empty() => {
                    let Flight { epoch, jobs, bytes, link: state } = flight;
                    bytes_in_flight -= bytes;
                    if epoch == present.epoch {
                        present.flights -= 1;
                        present.jobs -= jobs;
                        present.bytes -= bytes;
                        present.last_reply = Some(Instant::now());
                        if state != LinkState::Usable && is_up {
                            // One failure, however many batches were in flight.
                            if state == LinkState::Lost {
                                self.health.record_connection_failure("a connection was lost");
                            }
                            self.disconnected();
                            link = if self.health.is_open() {
                                attempts = 0;
                                timer.as_mut().reset(Instant::now() + self.health.probe_pause(attempts));
                                Link::Down
                            } else {
                                Link::Opening(this.opening())
                            };
                        }
                    }
                }
                opened = opening(&mut link) => match opened {
                    Ok(connection) => {
                        self.connected.fetch_add(1, Ordering::Relaxed);
                        link = Link::Up(connection);
                        present = Present { epoch: present.epoch + 1, ..Present::default() };
                        attempts = 0;
                    }
                    Err(why) => {
                        self.fail(batch.drain(..), &why);
                        link = Link::Down;
                        timer.as_mut().reset(Instant::now() + self.health.probe_pause(attempts));
                        attempts += 1;
                    }
                },
                changed = changes.changed() => {
                    let is_open = changed.is_ok() && *changes.borrow_and_update();
                    // A server that says nothing is tried anew; what its connection still answers is heard.
                    if is_open && !is_down {
                        if is_up {
                            self.disconnected();
                        }
                        link = Link::Down;
                        attempts = 0;
                        self.fail(batch.drain(..), &Failure::Unsent("its breaker is open".to_owned()));
                        timer.as_mut().reset(Instant::now() + self.health.probe_pause(attempts));
                    } else if !is_open && is_down {
                        // Another connection has shown that the server answers.
                        link = Link::Opening(this.opening());
                    }
                }
                many = jobs.recv_many(&mut batch, MAX_BATCH), if accepts => {
                    if many == 0 {
                        break;
                    }
                    if is_down && self.health.is_open() {
                        self.fail(batch.drain(..), &Failure::Unsent("its breaker is open".to_owned()));
                    } else if is_down {
                        link = Link::Opening(this.opening());
                    }
                }
                () = &mut timer, if is_down || is_up && present.flights > 0 && !may_overlap => {
                    may_overlap = true;
                    if is_down {
                        link = Link::Opening(this.opening());
                    }
                }
                _ = looks.tick(), if is_idle => {
                    if let Link::Up(open) = &link {
                        present.flights += 1;
                        present.last_reply = Some(Instant::now());
                        flights.push(boxed(this.look(open.clone(), present.epoch)));
                    }
                }
            }
            // Only now is it known whether anybody still waits.
            let given_up = batch.extract_if(.., |job| job.reply.is_closed());
            self.fail(given_up, &Failure::Unsent("its caller no longer waits".to_owned()));
            let Link::Up(open) = &link else { continue };
            if batch.is_empty() {
                continue;
            }
            let now = Instant::now();
            if present.flights > 0
                && present.last_reply.is_some_and(|at| now - at >= self.health.connection_silence())
            {
                // This connection is dead, whatever others to the same server are.
                self.disconnected();
                link = Link::Opening(this.opening());
                continue;
            }
            if let Some(job) = batch.first() {
                self.health.set_slot(job.slot);
            }
            // Only after connecting, which may have shown that another process took over.
            self.doubt(&mut batch);
            present.jobs += batch.len();
            present.flights += 1;
            if present.flights == 1 {
                present.last_reply = Some(now);
            }
            let bytes = batch.iter().map(Job::bytes).sum();
            bytes_in_flight += bytes;
            present.bytes += bytes;
            let calls = ScriptCall::group(batch.drain(..), self.merges);
            flights.push(boxed(this.serve(open.clone(), calls, present.epoch, bytes, oldest.subscribe())));
            may_overlap = false;
            timer.as_mut().reset(now + OVERLAP);
        }
        if matches!(link, Link::Up(_)) {
            self.disconnected();
        }
    }

    fn disconnected(&self) {
        self.connected.fetch_sub(1, Ordering::Relaxed);
    }

    fn fail(&self, jobs: impl Iterator<Item = Job>, why: &Failure) {
        jobs.for_each(|job| job.fail(why.clone(), &self.shared.late));
    }

    /// Checks an idle connection, so that its status is correct without traffic.
    async fn look(&self, mut connection: MultiplexedConnection, epoch: u64) -> Flight {
        // `TIME` is permitted even to users with few rights; an error reply still shows that the server responds.
        let word = redis::cmd("TIME");
        let most = self.health.connection_silence();
        let answer = tokio::time::timeout(most, word.query_async::<redis::Value>(&mut connection));
        let link = match answer.await {
            Ok(Err(error)) if error.is_unrecoverable_error() => LinkState::Lost,
            Ok(_) => {
                self.health.record_life();
                LinkState::Usable
            }
            Err(_) => LinkState::Lost,
        };
        Flight { epoch, jobs: 0, bytes: 0, link }
    }

    /// Records in each job what its server may have lost. An undo uses what was assumed when the units were taken.
    fn doubt(&self, batch: &mut [Job]) {
        let server_lost_at = self.run_id.lost_at();
        let now = self.shared.now();
        for job in batch.iter_mut().filter(|job| !matches!(job.command, Command::Undo { .. })) {
            let damaged_at =
                job.request.bundles.iter().filter_map(|key| self.shared.damaged_keys.seen_at(key));
            let lost_at = damaged_at.max().max(server_lost_at);
            job.request.loss.record(lost_at, now, self.shared.config.loss_window);
        }
    }

    fn opening(&self) -> Pin<Box<dyn Future<Output = Result<MultiplexedConnection, Failure>> + Send + '_>> {
        Box::pin(self.open())
    }

    /// Opens a connection. If the breaker is open or the server has refused to work, this is the probe: the server must
    /// also charge a counter, as a check does.
    async fn open(&self) -> Result<MultiplexedConnection, Failure> {
        let is_probe = self.health.is_open() || self.health.is_refusing();
        let probing = is_probe.then(|| self.health.probing());
        let opening = async {
            let mut connection = (self.connect)().await?;
            if is_probe {
                let slot = (!self.merges).then(|| self.health.slot());
                charge_probe(&mut connection, &self.shared.scripts, &self.shared.config.hashing, slot)
                    .await?;
            }
            redis::RedisResult::Ok(connection)
        };
        let opened = self.in_time(opening, self.shared.config.connect_timeout()).await;
        drop(probing);
        let error = match opened {
            Ok(Ok(connection)) => {
                if is_probe {
                    self.health.record_recovery();
                } else {
                    self.health.record_life();
                }
                return Ok(connection);
            }
            Ok(Err(error)) => error,
            Err(_) => {
                let why = "no connection in time";
                self.health.record_connection_failure(why);
                return Err(Failure::Unsent(why.to_owned()));
            }
        };
        Err(match ServerError::from_client(&error) {
            Some(refusal) => {
                self.health.record_refusal(&refusal);
                Failure::Rejected(refusal)
            }
            None => {
                self.health.record_connection_failure(&error.to_string());
                Failure::Unsent(error.to_string())
            }
        })
    }

    /// Waits at most `most`, and records if there is no answer within the deadline of a check.
    async fn in_time<T>(&self, answer: impl Future<Output = T>, most: Duration) -> Result<T, Elapsed> {
        let (mut answer, sent) = (pin!(answer), Instant::now());
        // A little sooner than the requests themselves give up: they then see what it has led to.
        let due = sent + self.shared.config.deadline * 15 / 16;
        match timeout_at(due, &mut answer).await {
            Ok(answered) => Ok(answered),
            Err(_) => {
                self.health.record_no_answer(Instant::now() - due);
                timeout_at(sent + most, answer).await
            }
        }
    }

    /// Sends calls and distributes their replies, however late they come.
    async fn serve(
        &self,
        mut connection: MultiplexedConnection,
        mut calls: Vec<ScriptCall>,
        epoch: u64,
        bytes: usize,
        mut oldest: watch::Receiver<u64>,
    ) -> Flight {
        let shared = &*self.shared;
        let jobs = calls.iter().map(ScriptCall::len).sum();
        let mut flight = Flight { epoch, jobs, bytes, link: LinkState::Usable };
        let mut round = Round::ByName;
        // A server without a cached script is sent its text; requests that failed together are sent one by one.
        while !calls.is_empty() {
            let fixed_time = shared.manual_clock.as_ref().map(Clock::now);
            let near = fixed_time.unwrap_or_else(|| shared.clock.now());
            let mut pipeline = redis::Pipeline::with_capacity(calls.len());
            for call in &calls {
                call.write(&mut pipeline, &shared.scripts, fixed_time, near, round == Round::ByName);
            }
            let sent = pipeline.len();
            let answer = connection.send_packed_commands(&pipeline, 0, sent);
            let answer = self.in_time(answer, PATIENCE);
            let answer = tokio::select! {
                biased;
                answer = answer => answer.ok(),
                _ = oldest.wait_for(|oldest| epoch < *oldest) => None,
            };
            let answered = match answer {
                Some(Ok(values)) if values.len() == sent => Ok(values),
                Some(Ok(_)) => Err("an answer of another length".to_owned()),
                Some(Err(error)) => Err(error.to_string()),
                None => Err("no answer in time".to_owned()),
            };
            let values = match answered {
                Ok(values) => values,
                Err(why) => {
                    calls.into_iter().for_each(|call| call.fail(&Failure::Lost(why.clone()), shared));
                    flight.link = LinkState::Lost;
                    return flight;
                }
            };
            let (mut again, mut refused, mut values) = (Vec::new(), None, values.into_iter());
            for call in calls {
                if call.is_asking() {
                    let _ = values.next();
                }
                match call.decode(values.next().unwrap_or(redis::Value::Nil), shared) {
                    CallResult::Done => {}
                    CallResult::Refused(error) => refused = Some(error),
                    CallResult::WrongServer(error) => {
                        (refused, flight.link) = (Some(error), LinkState::WrongServer);
                    }
                    CallResult::Again(calls) => again.extend(calls),
                }
            }
            match refused {
                Some(error) => self.health.record_refusal(&error),
                None => self.health.record_answer(),
            }
            if round == Round::Last {
                again.drain(..).for_each(|call: ScriptCall| {
                    call.fail(&Failure::Unsent("it cannot be sent".to_owned()), shared);
                });
            }
            calls = again;
            round = if round == Round::ByName { Round::ByText } else { Round::Last };
        }
        flight
    }
}

/// How often the calls of a batch have been sent.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Round {
    ByName,
    ByText,
    Last,
}

fn boxed<'a>(
    flight: impl Future<Output = Flight> + Send + 'a,
) -> Pin<Box<dyn Future<Output = Flight> + Send + 'a>> {
    Box::pin(flight)
}

/// Waits until the connection is open, if it is being opened.
async fn opening(link: &mut Link<'_>) -> Result<MultiplexedConnection, Failure> {
    match link {
        Link::Opening(opening) => opening.await,
        Link::Down | Link::Up(_) => std::future::pending().await,
    }
}

impl Job {
    /// Returns the bytes that the request takes while it is in flight, about: its keys, here and in its call.
    fn bytes(&self) -> usize {
        const OVERHEAD: usize = 512;
        OVERHEAD + 3 * self.request.bundles.iter().map(String::len).sum::<usize>()
    }

    /// Sends the reply to the waiting caller, or reports it as late.
    pub(super) fn answer(self, result: Result<ShardReply, Failure>, late: &LateReplies) {
        let Self { id, command, request, reply: sender, .. } = self;
        let result = result.map_err(|failure| FailedJob { failure, request });
        if let Err(result) = sender.send(result) {
            late.resolve(id, &command, result);
        }
    }

    pub(super) fn fail(self, why: Failure, late: &LateReplies) {
        self.answer(Err(why), late);
    }
}
