//! Audit log: every operator change with actor, origin, and state before and after, as a hash chain in which each
//! entry's hash covers the previous entry.
//!
//! Altering, removing or inserting an entry breaks every later hash; truncating the log contradicts the head.
//! An attacker who can rewrite both the whole table and the head can forge the log: ship the last hash elsewhere to
//! detect that too.

use crate::control_plane::ControlPlane;
use crate::db::on;
use crate::db::time::format_millis;
use crate::db::transaction::{Actor, ChangeRecord, Head};
use crate::error::ControlError;
use ring::digest;
use serde::Serialize;
use utoipa::ToSchema;

pub(crate) const INSERT: &str =
    "INSERT INTO audit (seq, at, actor, origin, action, target, before, after, hash)
     VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9)";

const SELECT: &str = "SELECT seq, at, actor, origin, action, target, before, after, hash FROM audit
     WHERE seq > $1 ORDER BY seq LIMIT $2";

/// Entries that match a filter; an empty text matches everything.
const SELECT_BEFORE: &str = "SELECT seq, at, actor, origin, action, target, before, after, hash FROM audit
     WHERE seq < $1 AND ($3 = '' OR actor = $3)
     AND ($4 = '' OR action = $4 OR SUBSTR(action, 1, LENGTH($4) + 1) = $4 || '.')
     AND ($5 = '' OR SUBSTR(target, 1, LENGTH($5)) = $5) AND at >= $6 AND at <= $7
     ORDER BY seq DESC LIMIT $2";

/// Maximum number of entries per read.
const MAX_PAGE: i64 = 1_000;

/// Returns the `after` value of a deletion: the reason, if one was given.
pub(crate) fn reason_only(reason: &str) -> String {
    if reason.is_empty() { String::new() } else { serde_json::json!({"reason": reason}).to_string() }
}

/// Filter of the audit log; what is absent matches everything.
#[derive(Clone, Debug, Default)]
pub struct AuditFilter {
    /// Name of the principal.
    pub actor: Option<String>,
    /// Action such as `quota.put`, or all that begin with a word: `quota`.
    pub action: Option<String>,
    /// First characters of the target.
    pub target: Option<String>,
    /// Earliest time, inclusive, in milliseconds since the epoch.
    pub from: Option<i64>,
    /// Latest time, inclusive.
    pub to: Option<i64>,
}

type AuditRow = (i64, i64, String, String, String, String, String, String, Vec<u8>);

/// One entry of the audit log.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, ToSchema)]
pub struct AuditEntry {
    /// Sequence number in the chain, starting at 1.
    pub seq: i64,
    /// Time of the change, in RFC 3339.
    #[schema(format = DateTime)]
    pub at: String,
    #[serde(skip)]
    pub(crate) at_millis: i64,
    /// Name of the principal that made the change.
    pub actor: String,
    /// Address that the change came from.
    pub origin: String,
    /// Action, such as `quota.put`.
    pub action: String,
    /// Object of the change.
    pub target: String,
    /// State before the change, in JSON; empty if none.
    pub before: String,
    /// State after the change, in JSON; empty if none.
    pub after: String,
    /// Hash of this entry and the previous one's hash.
    #[serde(serialize_with = "serialize_hex")]
    #[schema(value_type = String)]
    pub hash: [u8; 32],
}

/// Result of verifying the whole chain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AuditVerification {
    /// Every entry is as written.
    Intact {
        /// Number of entries.
        entries: i64,
        /// The last hash, in hexadecimal.
        head: String,
    },
    /// An entry was altered or is missing.
    Broken {
        /// Its sequence number.
        seq: i64,
        /// What is wrong with it.
        why: &'static str,
    },
}

impl AuditEntry {
    pub(crate) fn next(head: &Head, at: i64, actor: &Actor, changed: &ChangeRecord<'_>) -> Self {
        let mut entry = Self {
            seq: head.1 + 1,
            at: format_millis(at),
            at_millis: at,
            actor: actor.name.clone(),
            origin: actor.origin.clone(),
            action: changed.action.to_owned(),
            target: changed.target.to_owned(),
            before: changed.before.clone(),
            after: changed.after.clone(),
            hash: [0; 32],
        };
        entry.hash = entry.chain_hash(&head.2);
        entry
    }

    /// Hashes the previous hash and every field, each prefixed with its length, so that different entries never
    /// encode alike.
    fn chain_hash(&self, previous: &[u8]) -> [u8; 32] {
        let mut hash = digest::Context::new(&digest::SHA256);
        let (seq, at) = (self.seq.to_be_bytes(), self.at_millis.to_be_bytes());
        let texts = [&self.actor, &self.origin, &self.action, &self.target, &self.before, &self.after];
        let fields = [previous, &seq, &at].into_iter().chain(texts.map(String::as_bytes));
        for field in fields {
            hash.update(&(field.len() as u64).to_be_bytes());
            hash.update(field);
        }
        hash.finish().as_ref().try_into().unwrap_or_default()
    }

    fn from_row(row: AuditRow) -> Result<Self, ControlError> {
        let (seq, at, actor, origin, action, target, before, after, hash) = row;
        let hash =
            hash.try_into().map_err(|_| ControlError::Corrupt(format!("hash of audit entry {seq}")))?;
        Ok(Self {
            seq,
            at: format_millis(at),
            at_millis: at,
            actor,
            origin,
            action,
            target,
            before,
            after,
            hash,
        })
    }
}

/// Writes an audit entry and moves the head to it.
macro_rules! record {
    ($tx:ident, $head:ident, $at:expr, $actor:expr, $changed:expr) => {{
        let entry = $crate::audit::AuditEntry::next(&$head, $at, $actor, $changed);
        sqlx::query($crate::audit::INSERT)
            .bind(entry.seq)
            .bind(entry.at_millis)
            .bind(entry.actor.clone())
            .bind(entry.origin.clone())
            .bind(entry.action.clone())
            .bind(entry.target.clone())
            .bind(entry.before.clone())
            .bind(entry.after.clone())
            .bind(entry.hash.to_vec())
            .execute(&mut *$tx)
            .await?;
        sqlx::query("UPDATE head SET audit_seq = $1, audit_hash = $2 WHERE id = 1")
            .bind(entry.seq)
            .bind(entry.hash.to_vec())
            .execute(&mut *$tx)
            .await?;
    }};
}
pub(crate) use record;

impl ControlPlane {
    /// Returns at most `limit` entries before sequence number `before`, newest first.
    ///
    /// # Errors
    /// [`ControlError`] if the database is unavailable.
    pub async fn audit(&self, before: Option<i64>, limit: i64) -> Result<Vec<AuditEntry>, ControlError> {
        self.audit_matching(&AuditFilter::default(), before, limit).await
    }

    /// Returns at most `limit` matching entries before sequence number `before`, newest first.
    ///
    /// # Errors
    /// [`ControlError`] if the database is unavailable.
    pub async fn audit_matching(
        &self,
        filter: &AuditFilter,
        before: Option<i64>,
        limit: i64,
    ) -> Result<Vec<AuditEntry>, ControlError> {
        let before = before.unwrap_or(i64::MAX);
        let text = |text: &Option<String>| text.clone().unwrap_or_default();
        let rows: Vec<AuditRow> = on!(&self.db, pool => {
            sqlx::query_as(SELECT_BEFORE)
                .bind(before)
                .bind(limit)
                .bind(text(&filter.actor))
                .bind(text(&filter.action))
                .bind(text(&filter.target))
                .bind(filter.from.unwrap_or(i64::MIN))
                .bind(filter.to.unwrap_or(i64::MAX))
                .fetch_all(pool)
                .await?
        });
        rows.into_iter().map(AuditEntry::from_row).collect()
    }

    /// Returns a page of entries after `seq`, in order; empty if there are no more.
    ///
    /// # Errors
    /// [`ControlError`] if the database is unavailable.
    pub async fn audit_after(&self, seq: i64) -> Result<Vec<AuditEntry>, ControlError> {
        let rows: Vec<AuditRow> = on!(&self.db, pool => {
            sqlx::query_as(SELECT).bind(seq).bind(MAX_PAGE).fetch_all(pool).await?
        });
        rows.into_iter().map(AuditEntry::from_row).collect()
    }

    /// Verifies the whole chain.
    ///
    /// # Errors
    /// [`ControlError`] if the database is unavailable.
    pub async fn verify_audit(&self) -> Result<AuditVerification, ControlError> {
        // The head is read first: entries added meanwhile only follow it.
        let (last, head): (i64, Vec<u8>) = on!(&self.db, pool => {
            sqlx::query_as("SELECT audit_seq, audit_hash FROM head WHERE id = 1").fetch_one(pool).await?
        });
        let (mut seq, mut previous) = (0, [0; 32]);
        while seq < last {
            let page = MAX_PAGE.min(last - seq);
            let rows: Vec<AuditRow> = on!(&self.db, pool => {
                sqlx::query_as(SELECT).bind(seq).bind(page).fetch_all(pool).await?
            });
            if rows.is_empty() {
                return Ok(AuditVerification::Broken { seq: seq + 1, why: "entry is missing" });
            }
            for row in rows {
                let entry = AuditEntry::from_row(row)?;
                seq += 1;
                if entry.seq != seq {
                    return Ok(AuditVerification::Broken { seq, why: "entry is missing" });
                }
                if entry.chain_hash(&previous) != entry.hash {
                    return Ok(AuditVerification::Broken {
                        seq,
                        why: "hash does not match the entry and its predecessor",
                    });
                }
                previous = entry.hash;
                if seq == last {
                    break;
                }
            }
        }
        if previous[..] != head[..] {
            return Ok(AuditVerification::Broken {
                seq: last,
                why: "hash does not match the head; later entries may be missing",
            });
        }
        Ok(AuditVerification::Intact { entries: last, head: hex(&previous) })
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn serialize_hex<S: serde::Serializer>(bytes: &[u8; 32], out: S) -> Result<S::Ok, S::Error> {
    out.serialize_str(&hex(bytes))
}
