//! An agreement as a row of the table: the columns that all readers want, and those that only people do.

use crate::auth::key_hash::KeyHash;
use crate::db::time::{tell, tell_millis};
use crate::error::ControlError;
use crate::quota::overrides::QuotaOverride;
use crate::quota::pending::{Until, is_to_come, limits};
use crate::quota::record::Quota;
use sqlx::{FromRow, Row as _};

/// The columns of [`Row`], of [`Whole`] and of [`Change`], in the order in which they are read.
macro_rules! columns {
    () => {
        "key_hash, updated_at, revision, tier, overrides, effective_at, expires_at, until_tier, until_overrides, until_expires_at"
    };
    (whole) => {
        concat!(columns!(), ", key_prefix, reason, author")
    };
    (change) => {
        concat!(columns!(), ", deleted")
    };
}
pub(crate) use columns;

/// What those who follow want too.
pub(crate) struct Row {
    hash: Vec<u8>,
    /// In milliseconds.
    updated_at: i64,
    revision: i64,
    pub(crate) terms: Terms,
}

/// What is agreed, with its limits in JSON and its times in seconds.
pub(crate) struct Terms {
    tier: Option<String>,
    overrides: String,
    effective_at: Option<i64>,
    expires_at: Option<i64>,
    /// What acts until this does.
    until: Option<Until<String>>,
}

/// With what only people want.
pub(crate) struct Whole {
    pub(crate) row: Row,
    key_prefix: String,
    reason: String,
    author: String,
}

/// A row for those who follow, which may be one that is no more.
pub(crate) struct Change {
    row: Row,
    deleted: i64,
}

/// What a change says to those who follow.
pub(crate) struct Kept {
    pub(crate) hash: KeyHash,
    pub(crate) revision: i64,
    /// When it was changed, in milliseconds.
    pub(crate) updated_at: i64,
    /// `None`: there is no agreement any more.
    pub(crate) terms: Option<KeptTerms>,
}

pub(crate) struct KeptTerms {
    pub(crate) tier: Option<String>,
    pub(crate) overrides: Vec<QuotaOverride>,
    pub(crate) effective_at: Option<i64>,
    pub(crate) expires_at: Option<i64>,
    pub(crate) until: Option<Until<Vec<QuotaOverride>>>,
}

impl Row {
    fn hash(&self) -> Result<KeyHash, ControlError> {
        let broken = || ControlError::Broken("the hash of an API key".to_owned());
        KeyHash::from_slice(&self.hash).ok_or_else(broken)
    }
}

impl Terms {
    /// What acts now of an agreement, or until it does.
    pub(crate) fn acting(&self, now: i64) -> Option<Until<String>> {
        let Self { tier, overrides, effective_at, expires_at, until } = self;
        let own = Until { tier: tier.clone(), overrides: overrides.clone(), expires_at: *expires_at };
        own.acting(*effective_at, until.clone(), now)
    }
}

impl Whole {
    /// As it is told at a time, in seconds.
    pub(crate) fn quota(self, now: i64) -> Result<Quota, ControlError> {
        let Self { row, key_prefix, reason, author } = self;
        let hash = row.hash()?;
        let until = row.terms.acting(now).filter(|_| is_to_come(row.terms.effective_at, now));
        let Terms { tier, overrides, effective_at, expires_at, .. } = row.terms;
        Ok(Quota {
            id: hash.to_string(),
            key_prefix,
            tier,
            overrides: limits(&overrides)?,
            effective_at: effective_at.map(tell),
            expires_at: expires_at.map(tell),
            until_effective: until.map(Until::read).transpose()?.map(Until::tell),
            reason,
            author,
            updated_at: tell_millis(row.updated_at),
            revision: row.revision,
        })
    }
}

impl Change {
    pub(crate) fn kept(self) -> Result<Kept, ControlError> {
        let (hash, row) = (self.row.hash()?, self.row);
        let terms = if self.deleted == 0 {
            let Terms { tier, overrides, effective_at, expires_at, until } = row.terms;
            let (overrides, until) = (limits(&overrides)?, until.map(Until::read).transpose()?);
            Some(KeptTerms { tier, overrides, effective_at, expires_at, until })
        } else {
            None
        };
        Ok(Kept { hash, revision: row.revision, updated_at: row.updated_at, terms })
    }
}

/// In the order of `columns!`; the same for both databases.
macro_rules! read_from {
    ($database:ty) => {
        impl FromRow<'_, $database> for Row {
            fn from_row(from: &$database) -> sqlx::Result<Self> {
                let until = (from.try_get(7)?, from.try_get(8)?, from.try_get(9)?);
                Ok(Self {
                    hash: from.try_get(0)?,
                    updated_at: from.try_get(1)?,
                    revision: from.try_get(2)?,
                    terms: Terms {
                        tier: from.try_get(3)?,
                        overrides: from.try_get(4)?,
                        effective_at: from.try_get(5)?,
                        expires_at: from.try_get(6)?,
                        until: Until::of(until),
                    },
                })
            }
        }

        impl FromRow<'_, $database> for Whole {
            fn from_row(from: &$database) -> sqlx::Result<Self> {
                let (key_prefix, reason, author) = (from.try_get(10)?, from.try_get(11)?, from.try_get(12)?);
                Ok(Self { row: Row::from_row(from)?, key_prefix, reason, author })
            }
        }

        impl FromRow<'_, $database> for Change {
            fn from_row(from: &$database) -> sqlx::Result<Self> {
                Ok(Self { row: Row::from_row(from)?, deleted: from.try_get(10)? })
            }
        }
    };
}

read_from!(sqlx::sqlite::SqliteRow);
read_from!(sqlx::postgres::PgRow);
