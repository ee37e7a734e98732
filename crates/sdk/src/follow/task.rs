//! What a follower does, in order: at the start, and then every few seconds.

use super::client::{Client, StateResponse};
use super::config::{FollowConfig, FollowError};
use super::hot::HotExchange;
use super::replica::Replica;
use super::snapshot::Snapshot;
use http::HeaderValue;
use std::future::Future;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;
use tollgate_replica::{MAX_STALENESS_MS, ReplicaState};

/// Number of failures that make the time between two attempts longer, each by the usual one.
const MAX_BACKOFF: u32 = 2;

/// Reads the state, from the server or else from the snapshot. Returns it with what follows the server from then on.
pub(super) async fn start(
    config: FollowConfig,
) -> Result<(Arc<Replica>, impl Future<Output = ()> + Send + 'static), FollowError> {
    config.validate()?;
    let mut client = Client::new(&config)?;
    let (replica, tag) = match pull_any(&mut client, &config).await {
        Ok((replica, tag)) => (replica, tag),
        Err(error @ FollowError::Config(_)) => return Err(error),
        Err(error) => (restore(&config, error).await?, None),
    };
    let snapshots = write_snapshots(Arc::clone(&replica), config.snapshot.clone(), config.poll);
    let task = Task {
        replica: Arc::clone(&replica),
        client,
        config,
        tag,
        is_behind: false,
        hot: HotExchange::default(),
    };
    let following = async {
        tokio::join!(task.run(), snapshots);
    };
    Ok((replica, following))
}

/// Keeps the snapshot up to date, beside everything else: writing many quotas must not hold up an emergency measure.
async fn write_snapshots(replica: Arc<Replica>, path: Option<PathBuf>, pause: Duration) {
    let Some(mut snapshot) = path.map(Snapshot::new) else { return };
    loop {
        if replica.status.borrow().confirmed_at.is_some() {
            snapshot.write(&replica).await;
        }
        tokio::time::sleep(pause).await;
    }
}

/// Pulls everything from the server.
async fn pull(
    client: &mut Client,
    config: &FollowConfig,
) -> Result<(Arc<Replica>, Option<HeaderValue>), FollowError> {
    let StateResponse::State(state, tag) = client.state(None).await? else {
        return Err(FollowError::Invalid("the server sends no state".to_owned()));
    };
    let (options, revision) = (config.options.clone(), state.revision);
    let replica = tokio::task::spawn_blocking(move || Replica::new(*state, &options)).await;
    let replica = replica
        .unwrap_or_else(|error| Err(error.to_string()))
        .map_err(|error| FollowError::Invalid(format!("the server's rules cannot be used: {error}")))?;
    read_all_quotas(client, &replica).await?;
    confirm(&replica);
    replica.report(|status| status.states += 1);
    // Quotas of another node may be older than the state, which is then read again.
    let tag = tag.filter(|_| replica.revision() >= revision);
    Ok((replica, tag))
}

/// Restores the snapshot, because of what is wrong with the server.
async fn restore(config: &FollowConfig, server: FollowError) -> Result<Arc<Replica>, FollowError> {
    let Some(path) = config.snapshot.clone() else {
        let snapshot = "none is configured".to_owned();
        return Err(FollowError::NoState { server: Box::new(server), snapshot });
    };
    let (options, state, quotas) = (config.options.clone(), config.max_state_bytes, config.max_quota_bytes);
    let restored =
        tokio::task::spawn_blocking(move || Snapshot::restore(&path, &options, state, quotas)).await;
    let restored = restored.unwrap_or_else(|error| Err(FollowError::Invalid(error.to_string())));
    match restored {
        Ok(replica) => {
            tracing::warn!(error = %server, "starting from the snapshot");
            replica.report(|status| {
                status.is_from_snapshot = true;
                let damage = status.error.take().map(|error| format!("; {error}")).unwrap_or_default();
                status.error = Some(format!("{server}{damage}"));
            });
            Ok(replica)
        }
        Err(error) => Err(FollowError::NoState { server: Box::new(server), snapshot: error.to_string() }),
    }
}

/// The server has confirmed everything.
fn confirm(replica: &Replica) {
    let now = replica.now();
    replica.set_current_at(replica.now_millis());
    replica.report(|status| {
        (status.confirmed_at, status.error, status.is_from_snapshot) = (Some(now), None, false);
    });
}

async fn read_all_quotas(client: &mut Client, replica: &Arc<Replica>) -> Result<(), FollowError> {
    let table = replica.empty_table();
    let header = client.quotas(&table, &replica.installation).await?;
    replica.replace_quotas(table, header.revision);
    replica.report(|status| (status.has_quotas, status.full_reads) = (true, status.full_reads + 1));
    Ok(())
}

/// What the server's response says about the state here.
enum Followed {
    /// It is the server's.
    Current,
    /// It is newer than the server's, which was not applied.
    Behind,
}

/// Reads everything from the first server that responds.
async fn pull_any(
    client: &mut Client,
    config: &FollowConfig,
) -> Result<(Arc<Replica>, Option<HeaderValue>), FollowError> {
    let mut pulled = pull(client, config).await;
    for _ in 1..client.servers() {
        if pulled.is_ok() {
            break;
        }
        client.next_server();
        pulled = pull(client, config).await;
    }
    pulled
}

struct Task {
    replica: Arc<Replica>,
    client: Client,
    config: FollowConfig,
    /// Tag of the last state that was applied.
    tag: Option<HeaderValue>,
    /// Whether the last state was older than what is known here, and was not applied.
    is_behind: bool,
    hot: HotExchange,
}

impl Task {
    async fn run(mut self) {
        let mut reconciled = Instant::now();
        let mut failures = 0_u32;
        loop {
            tokio::time::sleep(self.pause(failures)).await;
            self.replica.remove_expired();
            let is_due = reconciled.elapsed() >= self.config.reconcile;
            match self.follow_any(is_due).await {
                Ok(Followed::Behind) => {}
                Ok(Followed::Current) => {
                    if is_due {
                        reconciled = Instant::now();
                        self.replica.report(|status| status.reconciliations += 1);
                    }
                    if failures > 0 {
                        tracing::info!(server = self.client.server(), "following the server again");
                    }
                    failures = 0;
                    confirm(&self.replica);
                    self.hot.exchange(&mut self.client, &self.replica, self.config.poll, is_due).await;
                }
                Err(error) => {
                    if failures == 0 {
                        tracing::warn!(%error, server = self.client.server(), "following the server failed; using the last known state");
                    }
                    failures = failures.saturating_add(1);
                    self.tag = None;
                    self.replica.report(|status| status.error = Some(error.to_string()));
                    self.hot.expire(&self.replica);
                }
            }
        }
    }

    /// Returns the time before the next attempt: not the same in all processes, and longer after failures, but never so
    /// long that a change takes more than a few seconds once the server is back.
    fn pause(&self, failures: u32) -> Duration {
        let spread = u32::try_from(self.replica.now().as_micros() % 256).unwrap_or(0);
        let poll = self.config.poll * (1 + failures.min(MAX_BACKOFF));
        poll - poll / 1_024 * spread
    }

    /// Follows the first server that responds, beginning with the last one that did.
    async fn follow_any(&mut self, reconciles: bool) -> Result<Followed, FollowError> {
        let mut followed = self.follow(reconciles).await;
        for _ in 1..self.client.servers() {
            let Err(error) = &followed else { break };
            let from = self.client.server().to_owned();
            self.client.next_server();
            tracing::warn!(%error, from, to = self.client.server(), "following another server");
            self.tag = None;
            followed = self.follow(reconciles).await;
        }
        followed
    }

    /// Asks for changes and applies them. `reconciles` compares everything.
    async fn follow(&mut self, reconciles: bool) -> Result<Followed, FollowError> {
        let tag = self.tag.clone().filter(|_| !reconciles);
        let (state, tag) = match self.client.state(tag.as_ref()).await? {
            StateResponse::Unchanged => {
                self.is_behind = false;
                return Ok(Followed::Current);
            }
            StateResponse::State(state, tag) => (*state, tag),
        };
        self.replica.report(|status| status.states += 1);
        // Behind a load balancer another node may know a little less. Only what the next attempt finds too, on another
        // connection, is a database that was restored.
        let was_behind = std::mem::replace(&mut self.is_behind, state.revision < self.replica.revision());
        if self.is_behind && !was_behind {
            self.client.disconnect();
            self.tag = None;
            return Ok(Followed::Behind);
        }
        self.is_behind = false;
        let state = self.apply(state).await?;
        if reconciles && self.differs(&state) {
            // The server's table may have changed between its revision and its digest: only a second look counts.
            let StateResponse::State(again, _) = self.client.state(None).await? else {
                return Ok(Followed::Behind);
            };
            self.replica.report(|status| status.states += 1);
            if again.revision < self.replica.revision() {
                return Ok(Followed::Behind);
            }
            let again = self.apply(*again).await?;
            if self.differs(&again) {
                tracing::warn!("the quotas differ from the server's; reading all of them again");
                read_all_quotas(&mut self.client, &self.replica).await?;
            }
        }
        self.tag = tag;
        Ok(Followed::Current)
    }

    fn differs(&self, state: &ReplicaState) -> bool {
        state.revision == self.replica.revision() && state.quotas != self.replica.quotas().digest()
    }

    async fn apply(&mut self, state: ReplicaState) -> Result<ReplicaState, FollowError> {
        let replica = &self.replica;
        if state.installation != replica.installation {
            let reason = "the server has another database than before; restart this program to follow it";
            return Err(FollowError::Invalid(reason.to_owned()));
        }
        replica.apply(state.clone(), &self.config.options).await;
        let own = replica.revision();
        let is_stale = replica.now_millis() - replica.current_at() > MAX_STALENESS_MS;
        if state.revision < own || is_stale || !replica.status.borrow().has_quotas {
            // The database was restored, or deletions may have been purged meanwhile.
            read_all_quotas(&mut self.client, replica).await?;
        }
        while replica.revision() < state.revision {
            let changes = self.client.changes(replica.revision()).await?;
            let table = replica.quotas();
            changes.quotas.into_iter().for_each(|change| table.apply(change));
            // Without a next page these are all changes that the server knew when it sent the state: revisions beyond
            // the last of them changed no quota.
            let through = if changes.more { changes.through } else { changes.through.max(state.revision) };
            replica.set_revision(through.min(state.revision));
        }
        replica.report(|_| ());
        Ok(state)
    }
}
