//! Records in Redis: reservations that every node finds, also after the node that made them has died.
//!
//! A record is one key, `tg1:{r%…}` with the hexadecimal digits of its name; a script compares and exchanges it. Records are few
//! beside checks, so they have connections of their own, and wait longer than a check may: a check never stands behind
//! them. A reply that does not come leaves open whether the exchange was made; the caller reads the record again.

use super::RedisStore;
use super::config::Kind;
use super::key_encoding::{self, Hashing};
use super::shard::{connect_to, primary, split};
use redis::aio::MultiplexedConnection;
use redis::{ErrorKind, RedisResult, ServerErrorKind, Value};
use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;
use tokio::time::{Instant, timeout_at};
use tollgate_core::{Exchange, RecordFuture, RecordName, RecordStore, StoreError, TimeDelta, Timestamp};

/// How many times as long as a check an exchange may wait,
const PATIENCE: u32 = 20;
/// but no longer than this, unless a check may.
const MAX_PATIENCE: Duration = Duration::from_millis(250);
const SCRIPT: &str = include_str!("lua/record.lua");
/// Servers that one exchange may be sent to: a slot that moves is asked for twice.
const ATTEMPTS: usize = 4;

/// Records in the servers of a [`RedisStore`].
pub struct RedisRecords {
    store: RedisStore,
    connections: Mutex<HashMap<String, MultiplexedConnection>>,
}

impl RedisRecords {
    /// Creates a record store in the same servers. Nothing is connected yet.
    #[must_use]
    pub fn new(store: RedisStore) -> Self {
        Self { store, connections: Mutex::default() }
    }

    async fn call(&self, name: RecordName, args: [&[u8]; 3]) -> Result<Exchange, StoreError> {
        let deadline = self.store.shared.config.deadline;
        let until = Instant::now() + (PATIENCE * deadline).min(MAX_PATIENCE.max(deadline));
        timeout_at(until, self.try_call(name, args)).await.unwrap_or(Err(StoreError::Timeout))
    }

    async fn try_call(&self, name: RecordName, args: [&[u8]; 3]) -> Result<Exchange, StoreError> {
        let key = key_of(name, &self.store.shared.config.hashing);
        let topology = &self.store.topology;
        let slot = if self.store.shared.config.kind == Kind::Cluster { key_encoding::slot(&key) } else { 0 };
        let (mut redirect, mut failure) = (None::<(String, bool)>, None);
        for _ in 0..ATTEMPTS {
            let (address, is_asking) = match redirect.take() {
                Some(target) => target,
                None => match topology.shard_for_slot(slot).await {
                    // A server whose breaker is open is not waited for.
                    Some(shard) if shard.health.is_open() => {
                        return Err(StoreError::Unavailable(format!(
                            "{}: its breaker is open",
                            shard.address
                        )));
                    }
                    Some(shard) => (shard.address.clone(), false),
                    None => {
                        return Err(StoreError::Unavailable("the cluster's slots are not known".to_owned()));
                    }
                },
            };
            match self.send(&address, &key, args, is_asking).await {
                Ok(exchange) => return Ok(exchange),
                Err(error) => {
                    topology.mark_stale();
                    redirect = error.redirect_node().map(|(to, _)| {
                        (to.to_owned(), error.kind() == ErrorKind::Server(ServerErrorKind::Ask))
                    });
                    // Only what the server refused was certainly not applied.
                    let refused =
                        redirect.is_some() || error.is_connection_refusal() || error.code().is_some();
                    if redirect.is_none() {
                        self.forget(&address);
                    }
                    failure = Some(StoreError::Unavailable(format!("{address}: {error}")));
                    if !refused {
                        break;
                    }
                }
            }
        }
        Err(failure.unwrap_or(StoreError::Timeout))
    }

    async fn send(
        &self,
        address: &str,
        key: &str,
        args: [&[u8]; 3],
        is_asking: bool,
    ) -> RedisResult<Exchange> {
        let mut connection = self.connection(address).await?;
        if is_asking {
            redis::cmd("ASKING").query_async::<Value>(&mut connection).await?;
        }
        let mut call = redis::cmd("EVAL");
        call.arg(SCRIPT).arg(1).arg(key).arg(&args[..]);
        let (stored, record, at): (i64, Option<Vec<u8>>, u64) = call.query_async(&mut connection).await?;
        Ok(Exchange { is_stored: stored == 1, record, at: Timestamp::from_micros(at) })
    }

    async fn connection(&self, address: &str) -> RedisResult<MultiplexedConnection> {
        let known = || self.connections.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(connection) = known().get(address).cloned() {
            return Ok(connection);
        }
        let config = &self.store.shared.config;
        let (host, port) = match config.kind {
            Kind::Sentinel => primary(config).await?,
            _ => split(address)?,
        };
        let connection = connect_to(config, &host, port).await?;
        known().insert(address.to_owned(), connection.clone());
        Ok(connection)
    }

    fn forget(&self, address: &str) {
        self.connections.lock().unwrap_or_else(PoisonError::into_inner).remove(address);
    }
}

impl RecordStore for RedisRecords {
    fn exchange<'a>(
        &'a self,
        name: RecordName,
        expected: Option<&'a [u8]>,
        new: Option<(&'a [u8], TimeDelta)>,
    ) -> RecordFuture<'a, Exchange> {
        Box::pin(async move {
            let life = new.map_or(0, |(_, life)| life.ceil_millis().max(1)).to_string();
            let bytes = new.map_or(&[][..], |(bytes, _)| bytes);
            self.call(name, [expected.unwrap_or_default(), bytes, life.as_bytes()]).await
        })
    }

    fn remove(&self, name: RecordName) -> RecordFuture<'_, ()> {
        Box::pin(async move { self.call(name, [b"", b"", b"-"]).await.map(|_| ()) })
    }
}

/// Returns the key of a record. It ends with its hash tag, as only the eight characters of a group do among counters.
fn key_of(RecordName(name): RecordName, hashing: &Hashing) -> String {
    let mut key = hashing.start();
    key.push_str("r%");
    for byte in name {
        key.push_str(&format!("{byte:02x}"));
    }
    key.push('}');
    key
}
