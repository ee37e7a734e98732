//! How the tables come about: at every start, once, whoever comes first. Nodes that start together wait for each other.
//!
//! Our own few lines and not `sqlx`'s migrator: it would bring a macro crate, and has no common files for two databases.

use crate::db::{Db, on};
use crate::error::ControlError;
use ring::rand::{SecureRandom, SystemRandom};
use sqlx::{AssertSqlSafe, Executor};

/// One step: what both databases do, and what each does in its own words.
struct Migration {
    both: &'static str,
    sqlite: &'static str,
    postgres: &'static str,
}

impl Migration {
    /// One in words that both understand.
    const fn same_for_both(both: &'static str) -> Self {
        Self { both, sqlite: "", postgres: "" }
    }
}

const MIGRATIONS: [Migration; 9] = [
    Migration {
        both: include_str!("migrations/0001.sql"),
        sqlite: include_str!("migrations/0001.sqlite.sql"),
        postgres: include_str!("migrations/0001.postgres.sql"),
    },
    Migration {
        both: include_str!("migrations/0002.sql"),
        sqlite: "",
        postgres: include_str!("migrations/0002.postgres.sql"),
    },
    Migration::same_for_both(include_str!("migrations/0003.sql")),
    Migration::same_for_both(include_str!("migrations/0004.sql")),
    Migration::same_for_both(include_str!("migrations/0005.sql")),
    Migration::same_for_both(include_str!("migrations/0006.sql")),
    Migration {
        both: include_str!("migrations/0007.sql"),
        sqlite: "",
        postgres: include_str!("migrations/0007.postgres.sql"),
    },
    Migration::same_for_both(include_str!("migrations/0008.sql")),
    Migration::same_for_both(include_str!("migrations/0009.sql")),
];

const VERSIONS: &str = "CREATE TABLE IF NOT EXISTS tollgate_schema (version BIGINT PRIMARY KEY)";

/// A number that no other program should have chosen for its lock.
const LOCK: i64 = 0x746f_6c6c_6761_7465;

/// Every change takes the one row of `head` first, and then the tables that it writes to; so must this, or a node that writes
/// meanwhile and this one wait for each other.
const LOCK_HEAD: &str = "SELECT 1 FROM head WHERE id = 1 FOR UPDATE";

/// Whether there is a table of versions, in the words of each.
const TABLE_EXISTS: [&str; 2] = [
    "SELECT COUNT(*) FROM sqlite_master WHERE name = 'tollgate_schema'",
    "SELECT COUNT(to_regclass('tollgate_schema'))",
];
const CURRENT_VERSION: &str = "SELECT COALESCE(MAX(version), 0) FROM tollgate_schema";

/// How often somebody who finds a file of SQLite being written to waits anew, a few seconds each time: another process may be
/// making the tables, and indexes over ten million rows take minutes.
const MAX_ATTEMPTS: u32 = 200;

/// The body of both arms: the transaction holds the lock already.
macro_rules! migrate {
    ($tx:ident, $own:ident) => {{
        $tx.execute(sqlx::raw_sql(VERSIONS)).await?;
        let (found,): (i64,) = sqlx::query_as(CURRENT_VERSION).fetch_one(&mut *$tx).await?;
        if !is_newest(found)? {
            first!($own, $tx, found);
        }
        for (version, step) in (1..).zip(&MIGRATIONS) {
            if version <= found {
                continue;
            }
            $tx.execute(sqlx::raw_sql(AssertSqlSafe(step.both))).await?;
            if !step.$own.is_empty() {
                $tx.execute(sqlx::raw_sql(AssertSqlSafe(step.$own))).await?;
            }
            sqlx::query("INSERT INTO tollgate_schema (version) VALUES ($1)")
                .bind(version)
                .execute(&mut *$tx)
                .await?;
        }
        if found == 0 {
            // The first node makes the secret that all hash API keys with.
            let insert =
                "INSERT INTO head (id, revision, audit_seq, audit_hash, key_secret) VALUES (1, 0, 0, $1, $2)";
            sqlx::query(insert).bind(vec![0_u8; 32]).bind(secret()?).execute(&mut *$tx).await?;
        }
        $tx.commit().await?;
    }};
}

/// A file of SQLite has one writer at a time anyway.
macro_rules! first {
    (sqlite, $tx:ident, $found:ident) => {};
    (postgres, $tx:ident, $found:ident) => {
        if $found > 0 {
            sqlx::query(LOCK_HEAD).execute(&mut *$tx).await?;
        }
    };
}

/// Whether any table of ours is there.
pub(crate) async fn is_initialized(db: &Db) -> Result<bool, ControlError> {
    let there = match db {
        Db::Sqlite { .. } => TABLE_EXISTS[0],
        Db::Postgres(_) => TABLE_EXISTS[1],
    };
    on!(db, pool => {
        let (there,): (i64,) = sqlx::query_as(there).fetch_one(pool).await?;
        Ok(there > 0)
    })
}

/// Whether all tables are there. Nobody waits for this, whoever writes.
pub(crate) async fn is_current(db: &Db) -> Result<bool, ControlError> {
    if !is_initialized(db).await? {
        return Ok(false);
    }
    on!(db, pool => {
        let (found,): (i64,) = sqlx::query_as(CURRENT_VERSION).fetch_one(pool).await?;
        is_newest(found)
    })
}

fn is_newest(found: i64) -> Result<bool, ControlError> {
    let known = i64::try_from(MIGRATIONS.len()).unwrap_or(i64::MAX);
    if found > known { Err(ControlError::TooNew { found, known }) } else { Ok(found == known) }
}

/// Makes the tables that are not there yet.
pub(crate) async fn migrate(db: &Db) -> Result<(), ControlError> {
    match db {
        Db::Sqlite { write: pool, .. } => {
            let mut turn = 1;
            let mut tx = loop {
                match pool.begin_with("BEGIN IMMEDIATE").await {
                    Err(error) if is_busy(&error) && turn < MAX_ATTEMPTS => turn += 1,
                    other => break other?,
                }
            };
            migrate!(tx, sqlite);
        }
        Db::Postgres(pool) => {
            let mut tx = pool.begin().await?;
            sqlx::query("SELECT pg_advisory_xact_lock($1)").bind(LOCK).execute(&mut *tx).await?;
            migrate!(tx, postgres);
        }
    }
    Ok(())
}

/// Whether somebody else is writing to a file of SQLite.
fn is_busy(error: &sqlx::Error) -> bool {
    // SQLITE_BUSY, whatever the upper bits say more exactly.
    let code = error.as_database_error().and_then(|error| error.code()?.parse::<u32>().ok());
    code.is_some_and(|code| code & 0xff == 5)
}

fn secret() -> Result<Vec<u8>, ControlError> {
    let mut secret = vec![0; 32];
    SystemRandom::new().fill(&mut secret).map_err(|_| ControlError::Corrupt("no randomness".into()))?;
    Ok(secret)
}
