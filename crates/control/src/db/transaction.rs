//! Write transactions: each takes the next control revision, writes an audit entry, and notifies the other nodes.
//! Both databases serialize changes: SQLite by `BEGIN IMMEDIATE`, PostgreSQL by the lock on the one row of `head`. So
//! revisions become visible in order, and a node that has seen one has seen all before it.

/// The principal that makes a change, and its address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Actor {
    /// Name of the token, or of the access path without one.
    pub name: String,
    /// Client address.
    pub origin: String,
}

/// Condition on the current state under which a change is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Precondition {
    /// Any state.
    Any,
    /// Nothing exists.
    Absent,
    /// Something exists.
    Present,
    /// The last change has this revision.
    Revision(i64),
}

impl Precondition {
    /// Returns whether the condition holds for the revision found.
    #[must_use]
    pub fn is_met(self, found: Option<i64>) -> bool {
        match self {
            Self::Any => true,
            Self::Absent => found.is_none(),
            Self::Present => found.is_some(),
            Self::Revision(revision) => found == Some(revision),
        }
    }
}

/// A change, as recorded in the audit log.
pub(crate) struct ChangeRecord<'a> {
    pub(crate) action: &'static str,
    pub(crate) target: &'a str,
    pub(crate) before: String,
    pub(crate) after: String,
}

/// NOTIFY channel for changes.
pub(crate) const CHANNEL: &str = "tollgate_changes";

/// Takes the next `$1` revisions; concurrent transactions wait for this.
pub(crate) const ADVANCE_HEAD: &str =
    "UPDATE head SET revision = revision + $1 WHERE id = 1 RETURNING revision, audit_seq, audit_hash";

/// The row that [`ADVANCE_HEAD`] returns.
pub(crate) type Head = (i64, i64, Vec<u8>);

/// Begins a transaction that writes. The bodies that use it are compiled for both databases.
macro_rules! begin {
    (sqlite, $pool:expr) => {
        $pool.begin_with("BEGIN IMMEDIATE").await?
    };
    (postgres, $pool:expr) => {
        $pool.begin().await?
    };
}
pub(crate) use begin;

/// Runs a body in a write transaction on either database, and notifies the other nodes. A body that makes several
/// changes takes as many revisions; `head` has the last of them.
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
