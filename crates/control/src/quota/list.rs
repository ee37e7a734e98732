//! Many agreements: page by page for people, all of them for an export, and from a revision on for those who follow.

use crate::auth::key_hash::{KeyHash, MAX_PREFIX};
use crate::control_plane::ControlPlane;
use crate::db::on;
use crate::error::ControlError;
use crate::quota::record::Quota;
use crate::quota::row::{ChangedQuotaRow, FullQuotaRow, ReplicatedQuota, columns};
use futures_util::TryStreamExt;
use serde::Serialize;
use utoipa::ToSchema;

const LIST: &str = concat!(
    "SELECT ",
    columns!(whole),
    " FROM quotas WHERE key_hash > $1 AND deleted = 0 ORDER BY key_hash LIMIT $2"
);

/// These two are in the order of the index that finds them, so that a page of very many is not sorted: what has changed while
/// somebody turns the pages comes again at the end.
const LIST_TIER: &str = concat!(
    "SELECT ",
    columns!(whole),
    " FROM quotas WHERE revision > $1 AND deleted = 0 AND tier = $3 ORDER BY revision LIMIT $2"
);

const LIST_PREFIX: &str = concat!(
    "SELECT ",
    columns!(whole),
    " FROM quotas WHERE (key_prefix, revision) > ($3, $1) AND key_prefix >= $4 AND key_prefix < $5 AND deleted = 0
     AND (CAST($6 AS TEXT) IS NULL OR tier = $6) ORDER BY key_prefix, revision LIMIT $2"
);

/// Deleted rows too: those who follow must forget them.
const SELECT_SINCE: &str =
    concat!("SELECT ", columns!(change), " FROM quotas WHERE revision > $1 ORDER BY revision LIMIT $2");

/// The most that one page of a list has.
const PAGE_SIZE: usize = 100;
/// The most that an export reads at once.
const EXPORT_PAGE: i64 = 2_000;
/// The most that those who follow read at once.
const MAX_CHANGES: i64 = 10_000;

/// Which agreements to list.
#[derive(Clone, Debug, Default)]
pub struct QuotaFilter {
    /// Those of this tier.
    pub tier: Option<String>,
    /// Those of keys that begin so, as far as the beginnings of keys are kept.
    pub prefix: Option<String>,
    /// Those after the last one of a page before.
    pub after: Option<Cursor>,
}

/// Where a page ends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Cursor {
    /// Of all: after this one.
    Id(KeyHash),
    /// Of a tier or a beginning: after this change, among those with the same beginning.
    Change {
        /// The last row's.
        revision: i64,
        /// The last row's; empty in a list of a tier.
        prefix: String,
    },
}

impl Cursor {
    /// Reads what a page told.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        if let Some(hash) = KeyHash::parse(text) {
            return Some(Self::Id(hash));
        }
        let (revision, prefix) = text.split_once('.')?;
        let (revision, prefix) = (revision.parse().ok()?, prefix.to_owned());
        Some(Self::Change { revision, prefix }).filter(|_| text.len() <= 32 + 4 * MAX_PREFIX)
    }

    /// What a list by hash, or one by changes, goes on after. One of another list than was asked for leads to its beginning.
    fn columns(this: Option<&Self>) -> (Vec<u8>, i64, String) {
        match this {
            Some(Self::Id(hash)) => (hash.0.to_vec(), -1, String::new()),
            Some(Self::Change { revision, prefix }) => (Vec::new(), *revision, prefix.clone()),
            None => (Vec::new(), -1, String::new()),
        }
    }
}

/// Some agreements, and where the next ones are.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = QuotaPage)]
pub struct QuotaPage {
    /// As they come.
    pub quotas: Vec<Quota>,
    /// What to ask for next; nothing, if these are the last.
    #[schema(required = true)]
    pub next_cursor: Option<String>,
}

impl ControlPlane {
    /// Some agreements, in the order of their ids; those of a tier or a beginning in the order of their last changes.
    ///
    /// # Errors
    /// [`ControlError`] if the database does not answer.
    pub async fn quotas(&self, wanted: &QuotaFilter) -> Result<QuotaPage, ControlError> {
        let (hash, revision, from) = Cursor::columns(wanted.after.as_ref());
        let most = i64::try_from(PAGE_SIZE + 1).unwrap_or(i64::MAX);
        let rows: Vec<FullQuotaRow> = on!(&self.db, pool => match (&wanted.prefix, &wanted.tier) {
            (None, None) => sqlx::query_as(LIST).bind(hash).bind(most).fetch_all(pool).await?,
            (None, Some(tier)) => {
                sqlx::query_as(LIST_TIER).bind(revision).bind(most).bind(tier.clone()).fetch_all(pool).await?
            }
            (Some(prefix), tier) => {
                let prefix: String = prefix.chars().take(MAX_PREFIX).collect();
                let beyond = format!("{prefix}{}", char::MAX);
                sqlx::query_as(LIST_PREFIX)
                    .bind(revision)
                    .bind(most)
                    .bind(from)
                    .bind(prefix)
                    .bind(beyond)
                    .bind(tier.clone())
                    .fetch_all(pool)
                    .await?
            }
        });
        let more = rows.len() > PAGE_SIZE;
        let now = self.now_seconds();
        let quotas = rows.into_iter().take(PAGE_SIZE).map(|row| row.quota(now));
        let quotas: Vec<Quota> = quotas.collect::<Result<_, _>>()?;
        let next_cursor = quotas.last().filter(|_| more).map(|last| match (&wanted.prefix, &wanted.tier) {
            (None, None) => last.id.clone(),
            (None, Some(_)) => format!("{}.", last.revision),
            (Some(_), _) => format!("{}.{}", last.revision, last.key_prefix),
        });
        Ok(QuotaPage { quotas, next_cursor })
    }

    /// Many agreements after one, in the order of their ids: each once, as it is when its page is read.
    ///
    /// # Errors
    /// [`ControlError`] if the database does not answer.
    pub async fn export(&self, after: Option<KeyHash>) -> Result<Vec<Quota>, ControlError> {
        let after = after.map_or_else(Vec::new, |hash| hash.0.to_vec());
        let rows: Vec<FullQuotaRow> = on!(&self.db, pool => {
            sqlx::query_as(LIST).bind(after).bind(EXPORT_PAGE).fetch_all(pool).await?
        });
        let now = self.now_seconds();
        rows.into_iter().map(|row| row.quota(now)).collect()
    }

    /// What has changed since a revision, in order; not all at once.
    pub(crate) async fn changes(&self, since: i64) -> Result<Vec<ReplicatedQuota>, ControlError> {
        let mut all = Vec::new();
        // A row is let go before the next one comes: the database's own take many times as much memory as ours.
        on!(&self.db, pool => {
            let mut rows = sqlx::query_as::<_, ChangedQuotaRow>(SELECT_SINCE).bind(since).bind(MAX_CHANGES).fetch(pool);
            while let Some(row) = rows.try_next().await? {
                all.push(row.into_replicated()?);
            }
        });
        Ok(all)
    }
}
