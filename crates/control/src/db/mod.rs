//! Database access for SQLite and PostgreSQL: the same statements with `$1`, run on either pool.
//!
//! A statement is written once, in a body that [`on!`] compiles for both. Rejected: `sqlx::Any`, because it supports
//! neither notifications nor the way SQLite transactions begin.

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
use tokio::time::Instant;

/// Maximum time that a statement waits for a connection.
const ACQUIRE_TIMEOUT: Duration = Duration::from_secs(5);

/// Pause before a busy SQLite file is opened again.
const BUSY_PAUSE: Duration = Duration::from_millis(10);

/// Page cache of the SQLite writer. An import inserts rows at random positions of an index: pages that do not fit are
/// written out and read in again many times within a batch.
const WRITER_CACHE_KIB: u32 = 64 * 1_024;
/// Maximum size of the write-ahead log after a checkpoint: 64 MiB.
const LOG_BYTES: u32 = 64 << 20;

/// During an import, checkpoints run every 128 MiB of log: the larger the step, the fewer pages are copied
/// repeatedly.
const WHILE_IMPORTING: &str = "PRAGMA wal_autocheckpoint = 32768";
/// After an import, the whole log is checkpointed and the memory released.
const AFTER_IMPORTING: &str =
    "PRAGMA wal_autocheckpoint = 1000; PRAGMA wal_checkpoint(PASSIVE); PRAGMA shrink_memory";

/// A control-plane database.
#[derive(Clone, Debug)]
pub enum Db {
    /// A file on this machine.
    Sqlite {
        /// Connections for readers.
        read: SqlitePool,
        /// The only connection for writers: a file has one writer at a time, and the pool serves writers in order of
        /// arrival, even while an import writes batch after batch.
        write: SqlitePool,
    },
    /// A server that several nodes share.
    Postgres(PgPool),
}

/// The start or the end of an import.
#[derive(Clone, Copy, Debug)]
pub(crate) enum ImportPhase {
    Begins,
    Ends,
}

/// Runs one body on either database; a body that writes uses the `write` form.
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

/// A statement around the current time of the database's clock, in milliseconds, for each database.
macro_rules! at_now {
    ($before:literal, $after:literal) => {
        [
            concat!($before, "CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER)", $after),
            concat!($before, "(EXTRACT(EPOCH FROM clock_timestamp()) * 1000)::BIGINT", $after),
        ]
    };
}
pub(crate) use at_now;

/// What to do if the SQLite file does not exist.
#[derive(Clone, Copy)]
enum IfMissing {
    Created,
    Refused,
}

impl Db {
    /// Opens `sqlite:FILE` or `postgres://…`. The address may contain a password, so no error repeats it.
    ///
    /// # Errors
    /// [`ControlError`] if the address is malformed or the database cannot be reached.
    pub async fn open(address: &str) -> Result<Self, ControlError> {
        Self::open_or(address, IfMissing::Created).await
    }

    /// Opens an existing database. A mistyped path creates nothing.
    ///
    /// # Errors
    /// [`ControlError`] if the database does not exist or cannot be reached.
    pub async fn open_existing(address: &str) -> Result<Self, ControlError> {
        Self::open_or(address, IfMissing::Refused).await
    }

    async fn open_or(address: &str, missing: IfMissing) -> Result<Self, ControlError> {
        if let Some(path) = address.strip_prefix("sqlite:") {
            let path = path.strip_prefix("//").unwrap_or(path);
            if path.is_empty() || path.contains('?') || path == ":memory:" {
                return Err(ControlError::Address(
                    "missing file after `sqlite:`; use sqlite:tollgate.db".into(),
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
            "unsupported database address; use sqlite:FILE or postgres://USER:PASSWORD@HOST/DATABASE".into(),
        ))
    }

    /// Opens a server that may be unavailable; it connects on first use.
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
                return Err(ControlError::Address(format!("no such database: {shown}")));
            }
        }
        let options = SqliteConnectOptions::new()
            .filename(path)
            .journal_mode(SqliteJournalMode::Wal)
            // Acknowledged changes are on disk.
            .synchronous(SqliteSynchronous::Full)
            // The SQLite thread hands over rows in batches, instead of one per thread switch.
            .row_buffer_size(512)
            .busy_timeout(ACQUIRE_TIMEOUT);
        let pool = SqlitePoolOptions::new().acquire_timeout(ACQUIRE_TIMEOUT);
        let read = first_connection(pool.clone().max_connections(4), &options).await?;
        let options = options
            .pragma("cache_size", format!("-{WRITER_CACHE_KIB}"))
            .pragma("journal_size_limit", LOG_BYTES.to_string());
        let write = pool.max_connections(1).connect_lazy_with(options);
        Ok(Self::Sqlite { read, write })
    }

    /// Returns the kind of database, without its address.
    #[must_use]
    pub const fn kind(&self) -> &'static str {
        match self {
            Self::Sqlite { .. } => "sqlite",
            Self::Postgres(_) => "postgres",
        }
    }

    /// Returns the SQL for this database, from one for SQLite and one for PostgreSQL ([`at_now!`]).
    pub(crate) const fn dialect(&self, sql: [&'static str; 2]) -> &'static str {
        match self {
            Self::Sqlite { .. } => sql[0],
            Self::Postgres(_) => sql[1],
        }
    }

    /// Configures the SQLite writer for an import, or for normal operation again.
    pub(crate) async fn importing(&self, phase: ImportPhase) -> Result<(), ControlError> {
        let Self::Sqlite { write, .. } = self else { return Ok(()) };
        let text = match phase {
            ImportPhase::Begins => WHILE_IMPORTING,
            ImportPhase::Ends => AFTER_IMPORTING,
        };
        sqlx::raw_sql(text).execute(write).await?;
        Ok(())
    }

    /// Closes all connections.
    pub async fn close(&self) {
        on!(self, pool => pool.close().await);
        if let Self::Sqlite { write, .. } = self {
            write.close().await;
        }
    }
}

/// Opens the first connection to a SQLite file, which switches the file to a write-ahead log. SQLite answers a second
/// process that switches at the same time with `SQLITE_BUSY` at once, without the busy timeout: both would wait for
/// the other's lock. So the open is repeated, for as long as a statement would wait.
async fn first_connection(
    pool: SqlitePoolOptions,
    options: &SqliteConnectOptions,
) -> Result<SqlitePool, sqlx::Error> {
    let deadline = Instant::now() + ACQUIRE_TIMEOUT;
    loop {
        match pool.clone().connect_with(options.clone()).await {
            Err(error) if is_busy(&error) && Instant::now() < deadline => {
                tokio::time::sleep(BUSY_PAUSE).await;
            }
            other => return other,
        }
    }
}

/// Returns whether another connection has locked the SQLite file.
pub(crate) fn is_busy(error: &sqlx::Error) -> bool {
    // SQLITE_BUSY; the upper bits hold the extended code.
    let code = error.as_database_error().and_then(|error| error.code()?.parse::<u32>().ok());
    code.is_some_and(|code| code & 0xff == 5)
}

fn postgres(address: &str) -> Result<(PgPoolOptions, PgConnectOptions), ControlError> {
    let options = PgConnectOptions::from_str(address)
        .map_err(|_| {
            ControlError::Address(
                "malformed PostgreSQL address; use postgres://USER:PASSWORD@HOST/DATABASE".into(),
            )
        })?
        .application_name("tollgate");
    Ok((PgPoolOptions::new().max_connections(8).acquire_timeout(ACQUIRE_TIMEOUT), options))
}

/// Builds the error for an unreachable server, with the cause: the pool retries until it times out, and then reports
/// only the timeout.
#[cold]
async fn unreachable(options: &PgConnectOptions, error: sqlx::Error) -> ControlError {
    let address = format!("PostgreSQL at {}", display_address(options));
    let sqlx::Error::PoolTimedOut = error else { return ControlError::Unreachable { address, error } };
    match tokio::time::timeout(ACQUIRE_TIMEOUT, PgConnection::connect_with(options)).await {
        Ok(Err(error)) => ControlError::Unreachable { address, error },
        _ => ControlError::Unreachable { address, error },
    }
}

/// Returns an address for display, without its password.
fn display_address(options: &PgConnectOptions) -> String {
    let (user, database) = (options.get_username(), options.get_database().unwrap_or_default());
    match options.get_socket() {
        Some(socket) => format!("postgres://{user}@/{database}?host={}", socket.display()),
        None => format!("postgres://{user}@{}:{}/{database}", options.get_host(), options.get_port()),
    }
}

/// Returns a database address without its password, which can come from the environment (`PGPASSWORD`) instead.
///
/// # Errors
/// [`ControlError`] if the address is malformed.
pub fn redact_password(address: &str) -> Result<String, ControlError> {
    if address.starts_with("sqlite:") {
        Ok(address.to_owned())
    } else {
        Ok(display_address(&postgres(address)?.1))
    }
}

/// Creates the file readable by its owner only: it contains the secret that API keys are hashed with.
fn create_private(path: &Path) -> std::io::Result<()> {
    use std::os::unix::fs::OpenOptionsExt;
    match std::fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(path) {
        Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => Ok(()),
        other => other.map(|_| ()),
    }
}
