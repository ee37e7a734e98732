//! The two databases as one: the same statements with `$1`, run on whichever pool there is.
//!
//! `sqlx::Any` was rejected: it knows neither notifications nor how a transaction of SQLite begins. A statement is written
//! once, in a body that [`on!`] compiles for both.

pub(crate) mod deadline;
pub(crate) mod migrate;
pub(crate) mod time;
pub(crate) mod transaction;

use crate::error::ControlError;
use sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use sqlx::sqlite::{SqliteConnectOptions, SqliteJournalMode, SqlitePoolOptions, SqliteSynchronous};
use sqlx::{Connection, PgConnection, PgPool, SqlitePool};
use std::path::Path;
use std::str::FromStr;
use std::time::Duration;

/// How long a statement waits for its turn.
const ACQUIRE_TIMEOUT: Duration = Duration::from_secs(5);

/// What the writer of a file may hold of it. An import puts rows at random places of an index: what does not fit is written
/// out and read in again many times within a batch.
const WRITER_CACHE_KIB: u32 = 64 * 1_024;
/// The longest that the log of a file stays when it has been moved into the file: 64 MiB.
const LOG_BYTES: u32 = 64 << 20;

/// While an import runs, 128 MiB of the log are moved at once: the more, the fewer pages are moved several times.
const WHILE_IMPORTING: &str = "PRAGMA wal_autocheckpoint = 32768";
/// Afterwards all of it is moved, and the memory given back.
const AFTER_IMPORTING: &str =
    "PRAGMA wal_autocheckpoint = 1000; PRAGMA wal_checkpoint(PASSIVE); PRAGMA shrink_memory";

/// Where what operators decide is kept.
#[derive(Clone, Debug)]
pub enum Db {
    /// A file on this machine.
    Sqlite {
        /// Connections for those who read.
        read: SqlitePool,
        /// The one connection for those who write: a file has one writer at a time, and here they get their turn in the order
        /// in which they came, also while an import writes one batch after another.
        write: SqlitePool,
    },
    /// A server that several nodes share.
    Postgres(PgPool),
}

/// Which end of an import it is.
#[derive(Clone, Copy, Debug)]
pub(crate) enum ImportPhase {
    Begins,
    Ends,
}

/// Runs one body on whichever database there is; one that writes says so.
macro_rules! on {
    ($db:expr, write $pool:ident => $body:expr) => {
        match $db {
            $crate::db::Db::Sqlite { write: $pool, .. } => $body,
            $crate::db::Db::Postgres($pool) => $body,
        }
    };
    ($db:expr, $pool:ident => $body:expr) => {
        match $db {
            $crate::db::Db::Sqlite { read: $pool, .. } => $body,
            $crate::db::Db::Postgres($pool) => $body,
        }
    };
}
pub(crate) use on;

/// A statement around the time by the database's own clock, in milliseconds, in the words of each.
macro_rules! at_now {
    ($before:literal, $after:literal) => {
        [
            concat!($before, "CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER)", $after),
            concat!($before, "(EXTRACT(EPOCH FROM clock_timestamp()) * 1000)::BIGINT", $after),
        ]
    };
}
pub(crate) use at_now;

/// What becomes of a file that is not there.
#[derive(Clone, Copy)]
enum IfMissing {
    Created,
    Refused,
}

impl Db {
    /// Opens `sqlite:FILE` or `postgres://…`. The address may hold a password, so no error repeats it.
    ///
    /// # Errors
    /// [`ControlError`] if the address is none of these, or nobody answers there.
    pub async fn open(address: &str) -> Result<Self, ControlError> {
        Self::open_or(address, IfMissing::Created).await
    }

    /// The same of one that is there: nothing is made of a path that was mistyped.
    ///
    /// # Errors
    /// [`ControlError`] if there is none, too.
    pub async fn open_existing(address: &str) -> Result<Self, ControlError> {
        Self::open_or(address, IfMissing::Refused).await
    }

    async fn open_or(address: &str, missing: IfMissing) -> Result<Self, ControlError> {
        if let Some(path) = address.strip_prefix("sqlite:") {
            let path = path.strip_prefix("//").unwrap_or(path);
            if path.is_empty() || path.contains('?') || path == ":memory:" {
                return Err(ControlError::Address(
                    "write a file after `sqlite:`, as in sqlite:tollgate.db".into(),
                ));
            }
            return Self::sqlite(Path::new(path), missing).await;
        }
        if address.starts_with("postgres://") || address.starts_with("postgresql://") {
            let (pool, options) = postgres(address)?;
            return match pool.connect_with(options.clone()).await {
                Ok(pool) => Ok(Self::Postgres(pool)),
                Err(error) => Err(unreachable(&options, error).await),
            };
        }
        Err(ControlError::Address(
            "write sqlite:FILE, as in sqlite:tollgate.db, or postgres://USER:PASSWORD@HOST/DATABASE".into(),
        ))
    }

    /// A server that does not answer yet; it is asked when it is needed.
    pub(crate) fn open_lazily(address: &str) -> Result<Self, ControlError> {
        let (pool, options) = postgres(address)?;
        Ok(Self::Postgres(pool.connect_lazy_with(options)))
    }

    async fn sqlite(path: &Path, missing: IfMissing) -> Result<Self, ControlError> {
        let shown = path.display();
        match missing {
            IfMissing::Created => create_private(path)
                .map_err(|error| ControlError::Address(format!("cannot create {shown}: {error}")))?,
            IfMissing::Refused if std::fs::metadata(path).is_ok_and(|file| file.len() > 0) => {}
            IfMissing::Refused => {
                return Err(ControlError::Address(format!("there is no such database: {shown}")));
            }
        }
        let options = SqliteConnectOptions::new()
            .filename(path)
            .journal_mode(SqliteJournalMode::Wal)
            // What has been acknowledged is on the disk.
            .synchronous(SqliteSynchronous::Full)
            // The thread that asks the file hands rows over so many at a time, and not each by a switch of its own.
            .row_buffer_size(512)
            .busy_timeout(ACQUIRE_TIMEOUT);
        let pool = SqlitePoolOptions::new().acquire_timeout(ACQUIRE_TIMEOUT);
        let read = pool.clone().max_connections(4).connect_with(options.clone()).await?;
        let options = options
            .pragma("cache_size", format!("-{WRITER_CACHE_KIB}"))
            .pragma("journal_size_limit", LOG_BYTES.to_string());
        let write = pool.max_connections(1).connect_lazy_with(options);
        Ok(Self::Sqlite { read, write })
    }

    /// What it is, without its address.
    #[must_use]
    pub const fn kind(&self) -> &'static str {
        match self {
            Self::Sqlite { .. } => "sqlite",
            Self::Postgres(_) => "postgres",
        }
    }

    /// The text for this database, of one for SQLite and one for PostgreSQL ([`at_now!`]).
    pub(crate) const fn dialect(&self, sql: [&'static str; 2]) -> &'static str {
        match self {
            Self::Sqlite { .. } => sql[0],
            Self::Postgres(_) => sql[1],
        }
    }

    /// Prepares the writer of a file for much at once, or for what is usual.
    pub(crate) async fn importing(&self, while_it_runs: ImportPhase) -> Result<(), ControlError> {
        let Self::Sqlite { write, .. } = self else { return Ok(()) };
        let text = match while_it_runs {
            ImportPhase::Begins => WHILE_IMPORTING,
            ImportPhase::Ends => AFTER_IMPORTING,
        };
        sqlx::raw_sql(text).execute(write).await?;
        Ok(())
    }

    /// Lets all connections go.
    pub async fn close(&self) {
        on!(self, pool => pool.close().await);
        if let Self::Sqlite { write, .. } = self {
            write.close().await;
        }
    }
}

fn postgres(address: &str) -> Result<(PgPoolOptions, PgConnectOptions), ControlError> {
    let options = PgConnectOptions::from_str(address)
        .map_err(|_| ControlError::Address("the address of PostgreSQL is malformed".into()))?
        .application_name("tollgate");
    Ok((PgPoolOptions::new().max_connections(8).acquire_timeout(ACQUIRE_TIMEOUT), options))
}

/// Who does not answer, and why. A pool tries again until it has no time left, and then says only that.
#[cold]
async fn unreachable(options: &PgConnectOptions, error: sqlx::Error) -> ControlError {
    let place = format!("PostgreSQL at {}", display_address(options));
    let sqlx::Error::PoolTimedOut = error else { return ControlError::Unreachable { address: place, error } };
    match tokio::time::timeout(ACQUIRE_TIMEOUT, PgConnection::connect_with(options)).await {
        Ok(Err(error)) => ControlError::Unreachable { address: place, error },
        _ => ControlError::Unreachable { address: place, error },
    }
}

/// An address without its password, for people.
fn display_address(options: &PgConnectOptions) -> String {
    let (user, database) = (options.get_username(), options.get_database().unwrap_or_default());
    match options.get_socket() {
        Some(socket) => format!("postgres://{user}@/{database}?host={}", socket.display()),
        None => format!("postgres://{user}@{}:{}/{database}", options.get_host(), options.get_port()),
    }
}

/// The address of a database as it can be told: without a password, which the environment (`PGPASSWORD`) may hold.
///
/// # Errors
/// [`ControlError`] if it is none.
pub fn redact_password(address: &str) -> Result<String, ControlError> {
    if address.starts_with("sqlite:") {
        Ok(address.to_owned())
    } else {
        Ok(display_address(&postgres(address)?.1))
    }
}

/// Creates the file for its owner alone: it holds the secret that API keys are hashed with.
fn create_private(path: &Path) -> std::io::Result<()> {
    use std::os::unix::fs::OpenOptionsExt;
    match std::fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(path) {
        Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => Ok(()),
        other => other.map(|_| ()),
    }
}
