//! Database rows of quotas: the columns that all readers need, and those that only the API needs.

use crate::db::time::{format_millis, format_time};
use crate::error::ControlError;
use crate::quota::pending::{PriorTerms, is_pending, parse_overrides};
use crate::quota::record::Quota;
use sqlx::{FromRow, Row as _};
use tollgate_replica::{KeyHash, ReplicatedQuota, ReplicatedTerms, Subject};

/// The columns of [`QuotaRow`], of [`FullQuotaRow`] and of [`ChangedQuotaRow`], in the order in which they are read.
macro_rules! columns {
    () => {
        "key_hash, updated_at, revision, tier, overrides, effective_at, expires_at, until_tier, until_overrides, until_expires_at, attribute, key_prefix"
    };
    (whole) => {
        concat!(columns!(), ", reason, author")
    };
    (change) => {
        concat!(columns!(), ", deleted")
    };
}
pub(crate) use columns;

/// The columns that replication needs too.
pub(crate) struct QuotaRow {
    hash: Vec<u8>,
    /// The attribute that identifies the caller.
    key: String,
    key_prefix: String,
    /// Time of the last change, in milliseconds.
    updated_at: i64,
    revision: i64,
    pub(crate) terms: QuotaTerms,
}

/// The terms of a quota, with overrides in JSON and times in seconds.
pub(crate) struct QuotaTerms {
    tier: Option<String>,
    overrides: String,
    effective_at: Option<i64>,
    expires_at: Option<i64>,
    /// The terms in effect until these start.
    until: Option<PriorTerms<String>>,
}

/// A row with the columns that only the API needs.
pub(crate) struct FullQuotaRow {
    pub(crate) row: QuotaRow,
    reason: String,
    author: String,
}

/// A row for replication, which may be deleted.
pub(crate) struct ChangedQuotaRow {
    row: QuotaRow,
    deleted: i64,
}

impl QuotaRow {
    fn hash(&self) -> Result<KeyHash, ControlError> {
        let corrupt = || ControlError::Corrupt("hash of an API key".to_owned());
        KeyHash::from_slice(&self.hash).ok_or_else(corrupt)
    }
}

impl QuotaTerms {
    /// Returns the terms in effect now: these, or those in effect until these start.
    pub(crate) fn active(&self, now: i64) -> Option<PriorTerms<String>> {
        let Self { tier, overrides, effective_at, expires_at, until } = self;
        let own = PriorTerms { tier: tier.clone(), overrides: overrides.clone(), expires_at: *expires_at };
        own.active(*effective_at, until.clone(), now)
    }
}

impl FullQuotaRow {
    /// Returns the quota as of `now`, in seconds.
    pub(crate) fn quota(self, now: i64) -> Result<Quota, ControlError> {
        let Self { row, reason, author } = self;
        let hash = row.hash()?;
        let until = row.terms.active(now).filter(|_| is_pending(row.terms.effective_at, now));
        let QuotaTerms { tier, overrides, effective_at, expires_at, .. } = row.terms;
        Ok(Quota {
            id: hash.to_string(),
            key: row.key,
            key_prefix: row.key_prefix,
            tier,
            overrides: parse_overrides(&overrides)?,
            effective_at: effective_at.map(format_time),
            expires_at: expires_at.map(format_time),
            until_effective: until.map(PriorTerms::parse).transpose()?.map(PriorTerms::into_current),
            reason,
            author,
            updated_at: format_millis(row.updated_at),
            revision: row.revision,
        })
    }
}

impl ChangedQuotaRow {
    pub(crate) fn into_replicated(self) -> Result<ReplicatedQuota, ControlError> {
        let (hash, row) = (self.row.hash()?, self.row);
        let terms = if self.deleted == 0 {
            let QuotaTerms { tier, overrides, effective_at, expires_at, until } = row.terms;
            let (overrides, until) =
                (parse_overrides(&overrides)?, until.map(PriorTerms::parse).transpose()?);
            let until = until.map(PriorTerms::into_replicated);
            Some(ReplicatedTerms { tier, overrides, effective_at, expires_at, until })
        } else {
            None
        };
        let subject = Subject::new(row.key, &row.key_prefix);
        let hash = hash.table_hash();
        Ok(ReplicatedQuota { hash, subject, revision: row.revision, updated_at: row.updated_at, terms })
    }
}

/// Reads columns in the order of `columns!`, for either database.
macro_rules! impl_from_row {
    ($database:ty) => {
        impl FromRow<'_, $database> for QuotaRow {
            fn from_row(from: &$database) -> sqlx::Result<Self> {
                let until = (from.try_get(7)?, from.try_get(8)?, from.try_get(9)?);
                Ok(Self {
                    hash: from.try_get(0)?,
                    key: from.try_get(10)?,
                    key_prefix: from.try_get(11)?,
                    updated_at: from.try_get(1)?,
                    revision: from.try_get(2)?,
                    terms: QuotaTerms {
                        tier: from.try_get(3)?,
                        overrides: from.try_get(4)?,
                        effective_at: from.try_get(5)?,
                        expires_at: from.try_get(6)?,
                        until: PriorTerms::from_columns(until),
                    },
                })
            }
        }

        impl FromRow<'_, $database> for FullQuotaRow {
            fn from_row(from: &$database) -> sqlx::Result<Self> {
                Ok(Self {
                    row: QuotaRow::from_row(from)?,
                    reason: from.try_get(12)?,
                    author: from.try_get(13)?,
                })
            }
        }

        impl FromRow<'_, $database> for ChangedQuotaRow {
            fn from_row(from: &$database) -> sqlx::Result<Self> {
                Ok(Self { row: QuotaRow::from_row(from)?, deleted: from.try_get(12)? })
            }
        }
    };
}

impl_from_row!(sqlx::sqlite::SqliteRow);
impl_from_row!(sqlx::postgres::PgRow);
