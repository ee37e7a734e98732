//! Schema migrations, run at every start by the first node that gets the lock. Nodes that start together wait for
//! each other.
//!
//! Rejected: the migrator of `sqlx`, because it adds a macro crate and cannot share files between two databases.

use crate::db::{Db, is_busy, on};
use crate::error::ControlError;
use ring::rand::{SecureRandom, SystemRandom};
use sqlx::{AssertSqlSafe, Executor};

/// One migration: the SQL common to both databases, and the SQL of each.
struct Migration {
    both: &'static str,
    sqlite: &'static str,
    postgres: &'static str,
}

impl Migration {
    /// Creates a migration with the same SQL for both databases.
    const fn same_for_both(both: &'static str) -> Self {
        Self { both, sqlite: "", postgres: "" }
    }
}

const MIGRATIONS: [Migration; 14] = [
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
    Migration::same_for_both(include_str!("migrations/0010.sql")),
    Migration::same_for_both(include_str!("migrations/0011.sql")),
    Migration::same_for_both(include_str!("migrations/0012.sql")),
    Migration::same_for_both(include_str!("migrations/0013.sql")),
    Migration::same_for_both(include_str!("migrations/0014.sql")),
];

const VERSIONS: &str = "CREATE TABLE IF NOT EXISTS tollgate_schema (version BIGINT PRIMARY KEY)";

/// Advisory lock id, unlikely to be used by another program.
const LOCK: i64 = 0x746f_6c6c_6761_7465;

/// Every change locks the one row of `head` first, and then the tables that it writes to. Migrations must do the
/// same, or they deadlock with a node that writes meanwhile.
const LOCK_HEAD: &str = "SELECT 1 FROM head WHERE id = 1 FOR UPDATE";

/// Query for the existence of the version table, for each database.
const TABLE_EXISTS: [&str; 2] = [
    "SELECT COUNT(*) FROM sqlite_master WHERE name = 'tollgate_schema'",
    "SELECT COUNT(to_regclass('tollgate_schema'))",
];
const CURRENT_VERSION: &str = "SELECT COALESCE(MAX(version), 0) FROM tollgate_schema";

/// Maximum number of waits for a busy SQLite file, a few seconds each: another process may be migrating, and indexes
/// over ten million rows take minutes.
const MAX_ATTEMPTS: u32 = 200;

/// The body of both arms; the transaction already holds the lock.
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
            // The first node generates the secret that all nodes hash API keys with.
            let insert =
                "INSERT INTO head (id, revision, audit_seq, audit_hash, key_secret) VALUES (1, 0, 0, $1, $2)";
            sqlx::query(insert).bind(vec![0_u8; 32]).bind(secret()?).execute(&mut *$tx).await?;
        }
        $tx.commit().await?;
    }};
}

/// Locks the head row first, in PostgreSQL; a SQLite file has one writer at a time anyway.
macro_rules! first {
    (sqlite, $tx:ident, $found:ident) => {};
    (postgres, $tx:ident, $found:ident) => {
        if $found > 0 {
            sqlx::query(LOCK_HEAD).execute(&mut *$tx).await?;
        }
    };
}

/// Returns whether the database has Tollgate's tables.
pub(crate) async fn is_initialized(db: &Db) -> Result<bool, ControlError> {
    let query = match db {
        Db::Sqlite { .. } => TABLE_EXISTS[0],
        Db::Postgres(_) => TABLE_EXISTS[1],
    };
    on!(db, pool => {
        let (tables,): (i64,) = sqlx::query_as(query).fetch_one(pool).await?;
        Ok(tables > 0)
    })
}

/// Returns whether the schema is current. Never blocks on writers.
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

/// Applies the missing migrations.
pub(crate) async fn migrate(db: &Db) -> Result<(), ControlError> {
    match db {
        Db::Sqlite { write: pool, .. } => {
            let mut attempt = 1;
            let mut tx = loop {
                match pool.begin_with("BEGIN IMMEDIATE").await {
                    Err(error) if is_busy(&error) && attempt < MAX_ATTEMPTS => attempt += 1,
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

fn secret() -> Result<Vec<u8>, ControlError> {
    let mut secret = vec![0; 32];
    SystemRandom::new().fill(&mut secret).map_err(|_| ControlError::Corrupt("no randomness".into()))?;
    Ok(secret)
}
