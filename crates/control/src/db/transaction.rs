//! A change of anything: one transaction, which takes the next revision, writes the entry of the audit log, and tells the
//! other nodes. Both databases make changes one after another: SQLite by `BEGIN IMMEDIATE`, PostgreSQL by the lock on the
//! one row of `head`. So revisions become visible in order, and a node that has seen one has seen all before it.

/// Who makes a change, and from where.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Actor {
    /// The name of the token, or of the way in.
    pub name: String,
    /// The address.
    pub origin: String,
}

/// What the caller believes is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Precondition {
    /// Whatever it is.
    Any,
    /// Nothing.
    Absent,
    /// Something.
    Present,
    /// What this revision left.
    Revision(i64),
}

impl Precondition {
    /// Whether it is there.
    pub(crate) fn is_met(self, found: Option<i64>) -> bool {
        match self {
            Self::Any => true,
            Self::Absent => found.is_none(),
            Self::Present => found.is_some(),
            Self::Revision(revision) => found == Some(revision),
        }
    }
}

/// What was changed: the content of the entry in the audit log.
pub(crate) struct ChangeRecord<'a> {
    pub(crate) action: &'static str,
    pub(crate) target: &'a str,
    pub(crate) before: String,
    pub(crate) after: String,
}

/// The name that changes are told under.
pub(crate) const CHANNEL: &str = "tollgate_changes";

/// Takes the next revision, or the next so many; everything else of the transaction waits for this.
pub(crate) const ADVANCE_HEAD: &str =
    "UPDATE head SET revision = revision + $1 WHERE id = 1 RETURNING revision, audit_seq, audit_hash";

/// The row that [`ADVANCE_HEAD`] returns.
pub(crate) type Head = (i64, i64, Vec<u8>);

/// Begins a transaction that will write. The bodies that use it are compiled for both databases.
macro_rules! begin {
    (sqlite, $pool:expr) => {
        $pool.begin_with("BEGIN IMMEDIATE").await?
    };
    (postgres, $pool:expr) => {
        $pool.begin().await?
    };
}
pub(crate) use begin;

/// Runs a body in a transaction that writes, on whichever database there is, and tells the other nodes. One that changes
/// several things takes as many revisions; `head` has the last of them.
macro_rules! writing {
    ($db:expr, |$tx:ident, $head:ident| $body:block) => {
        $crate::db::transaction::writing!($db, 1_i64, |$tx, $head| $body)
    };
    ($db:expr, $revisions:expr, |$tx:ident, $head:ident| $body:block) => {
        match $db {
            $crate::db::Db::Sqlite { write: pool, .. } => {
                let mut $tx = $crate::db::transaction::begin!(sqlite, pool);
                let $head: $crate::db::transaction::Head =
                    sqlx::query_as($crate::db::transaction::ADVANCE_HEAD)
                        .bind($revisions)
                        .fetch_one(&mut *$tx)
                        .await?;
                let done = $body;
                $tx.commit().await?;
                done
            }
            $crate::db::Db::Postgres(pool) => {
                let mut $tx = $crate::db::transaction::begin!(postgres, pool);
                let $head: $crate::db::transaction::Head =
                    sqlx::query_as($crate::db::transaction::ADVANCE_HEAD)
                        .bind($revisions)
                        .fetch_one(&mut *$tx)
                        .await?;
                let done = $body;
                sqlx::query("SELECT pg_notify($1, $2)")
                    .bind($crate::db::transaction::CHANNEL)
                    .bind($head.0.to_string())
                    .execute(&mut *$tx)
                    .await?;
                $tx.commit().await?;
                done
            }
        }
    };
}
pub(crate) use writing;
