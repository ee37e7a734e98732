//! How the tables come about: at every start, once, whoever comes first. Nodes that start together wait for each other.
//!
//! Our own few lines and not `sqlx`'s migrator: it would bring a macro crate, and has no common files for two databases.

use crate::db::{ControlError, Db};
use ring::rand::{SecureRandom, SystemRandom};
use sqlx::{AssertSqlSafe, Executor};

/// One step: what both databases do, and what each does in its own words.
struct Step {
    both: &'static str,
    sqlite: &'static str,
    postgres: &'static str,
}

impl Step {
    /// One in words that both understand.
    const fn alike(both: &'static str) -> Self {
        Self { both, sqlite: "", postgres: "" }
    }
}

const STEPS: [Step; 6] = [
    Step {
        both: include_str!("migrations/0001.sql"),
        sqlite: include_str!("migrations/0001.sqlite.sql"),
        postgres: include_str!("migrations/0001.postgres.sql"),
    },
    Step {
        both: include_str!("migrations/0002.sql"),
        sqlite: "",
        postgres: include_str!("migrations/0002.postgres.sql"),
    },
    Step::alike(include_str!("migrations/0003.sql")),
    Step::alike(include_str!("migrations/0004.sql")),
    Step::alike(include_str!("migrations/0005.sql")),
    Step::alike(include_str!("migrations/0006.sql")),
];

const VERSIONS: &str = "CREATE TABLE IF NOT EXISTS tollgate_schema (version BIGINT PRIMARY KEY)";

/// A number that no other program should have chosen for its lock.
const LOCK: i64 = 0x746f_6c6c_6761_7465;

/// The body of both arms: the transaction holds the lock already.
macro_rules! migrate {
    ($tx:ident, $own:ident) => {{
        $tx.execute(sqlx::raw_sql(VERSIONS)).await?;
        let (found,): (i64,) = sqlx::query_as("SELECT COALESCE(MAX(version), 0) FROM tollgate_schema")
            .fetch_one(&mut *$tx)
            .await?;
        let known = i64::try_from(STEPS.len()).unwrap_or(i64::MAX);
        if found > known {
            return Err(ControlError::TooNew { found, known });
        }
        for (version, step) in (1..).zip(&STEPS) {
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
        // The first node makes the secret that all hash API keys with.
        let insert =
            "INSERT INTO head (id, revision, audit_seq, audit_hash, key_secret) VALUES (1, 0, 0, $1, $2)
                      ON CONFLICT (id) DO NOTHING";
        sqlx::query(insert).bind(vec![0_u8; 32]).bind(secret()?).execute(&mut *$tx).await?;
        $tx.commit().await?;
    }};
}

/// Makes the tables that are not there yet.
pub(crate) async fn migrate(db: &Db) -> Result<(), ControlError> {
    match db {
        Db::Sqlite { write: pool, .. } => {
            let mut tx = pool.begin_with("BEGIN IMMEDIATE").await?;
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
    SystemRandom::new().fill(&mut secret).map_err(|_| ControlError::Broken("no randomness".into()))?;
    Ok(secret)
}
