//! Quota lists: pages for operators, exports, and changes since a revision for replication.

use crate::control_plane::ControlPlane;
use crate::db::on;
use crate::error::ControlError;
use crate::quota::record::Quota;
use crate::quota::row::{ChangedQuotaRow, FullQuotaRow, columns};
use futures_util::TryStreamExt;
use serde::Serialize;
use tollgate_replica::{KeyHash, MAX_PREFIX, MAX_SHOWN, ReplicatedQuota};
use tollgate_rules::CALLER_KEY;
use utoipa::ToSchema;

const LIST: &str = concat!(
    "SELECT ",
    columns!(whole),
    " FROM quotas WHERE key_hash > $1 AND deleted = 0 AND (CAST($3 AS TEXT) IS NULL OR attribute = $3) ORDER BY key_hash LIMIT $2"
);

/// Uses the index of quotas of other attributes than API keys.
const LIST_ATTRIBUTE: &str = concat!(
    "SELECT ",
    columns!(whole),
    " FROM quotas WHERE attribute = $3 AND attribute <> 'api_key' AND key_hash > $1 AND deleted = 0
     ORDER BY key_hash LIMIT $2"
);

/// Lists by tier or prefix use the order of their index, so that a long list need not be sorted: a quota that changes
/// while the pages are read appears again at the end.
const LIST_TIER: &str = concat!(
    "SELECT ",
    columns!(whole),
    " FROM quotas WHERE revision > $1 AND deleted = 0 AND tier = $3 AND (CAST($4 AS TEXT) IS NULL OR attribute = $4)
     ORDER BY revision LIMIT $2"
);

const LIST_PREFIX: &str = concat!(
    "SELECT ",
    columns!(whole),
    " FROM quotas WHERE (key_prefix, revision) > ($3, $1) AND key_prefix >= $4 AND key_prefix < $5 AND deleted = 0
     AND (CAST($6 AS TEXT) IS NULL OR tier = $6) AND (CAST($7 AS TEXT) IS NULL OR attribute = $7) ORDER BY key_prefix, revision LIMIT $2"
);

/// Includes deleted rows, because other nodes must remove them.
const SELECT_SINCE: &str =
    concat!("SELECT ", columns!(change), " FROM quotas WHERE revision > $1 ORDER BY revision LIMIT $2");

/// Maximum number of quotas per page of a list.
const PAGE_SIZE: usize = 100;
/// Quotas per page of an export.
const EXPORT_PAGE: i64 = 2_000;
/// Changes per page of replication.
pub(crate) const MAX_CHANGES: i64 = 10_000;

/// Selects the quotas to list.
#[derive(Clone, Debug, Default)]
pub struct QuotaFilter {
    /// Only quotas of this tier.
    pub tier: Option<String>,
    /// Only quotas of callers whose value has this prefix, as far as prefixes are stored.
    pub prefix: Option<String>,
    /// Only quotas of callers that this attribute identifies.
    pub key: Option<String>,
    /// Only quotas after the last one of the previous page.
    pub after: Option<Cursor>,
}

/// The end of a page.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Cursor {
    /// In the list of all quotas: after this id.
    Id(KeyHash),
    /// In a list by tier or prefix: after this change, among keys with the same prefix.
    Change {
        /// Revision of the last row.
        revision: i64,
        /// Key prefix of the last row; empty in a list by tier.
        prefix: String,
    },
}

impl Cursor {
    /// Parses a page's `next_cursor`.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        if let Some(hash) = KeyHash::parse(text) {
            return Some(Self::Id(hash));
        }
        let (revision, prefix) = text.split_once('.')?;
        let (revision, prefix) = (revision.parse().ok()?, prefix.to_owned());
        Some(Self::Change { revision, prefix }).filter(|_| text.len() <= 32 + 4 * MAX_SHOWN)
    }

    /// Returns where a list by hash, or one by changes, continues. A cursor of the other kind of list starts at the
    /// beginning.
    fn columns(this: Option<&Self>) -> (Vec<u8>, i64, String) {
        match this {
            Some(Self::Id(hash)) => (hash.0.to_vec(), -1, String::new()),
            Some(Self::Change { revision, prefix }) => (Vec::new(), *revision, prefix.clone()),
            None => (Vec::new(), -1, String::new()),
        }
    }
}

/// A page of quotas, and the cursor of the next one.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = QuotaPage)]
pub struct QuotaPage {
    /// The quotas.
    pub quotas: Vec<Quota>,
    /// Cursor of the next page; absent on the last page.
    #[schema(required = true)]
    pub next_cursor: Option<String>,
}

/// Returns the list of quotas ordered by id, of all or of one attribute.
fn by_id(key: Option<&str>) -> &'static str {
    if key.is_some_and(|key| key != CALLER_KEY) { LIST_ATTRIBUTE } else { LIST }
}

impl ControlPlane {
    /// Returns a page of quotas, ordered by id; if filtered by tier or prefix, by last change.
    ///
    /// # Errors
    /// [`ControlError`] if the database is unavailable.
    pub async fn quotas(&self, filter: &QuotaFilter) -> Result<QuotaPage, ControlError> {
        let (hash, revision, from) = Cursor::columns(filter.after.as_ref());
        let max = i64::try_from(PAGE_SIZE + 1).unwrap_or(i64::MAX);
        let rows: Vec<FullQuotaRow> = on!(&self.db, pool => match (&filter.prefix, &filter.tier) {
            (None, None) => {
                sqlx::query_as(by_id(filter.key.as_deref())).bind(hash).bind(max).bind(filter.key.clone()).fetch_all(pool).await?
            }
            (None, Some(tier)) => {
                sqlx::query_as(LIST_TIER).bind(revision).bind(max).bind(tier.clone()).bind(filter.key.clone()).fetch_all(pool).await?
            }
            (Some(prefix), tier) => {
                // A network is stored whole, anything else by a few leading characters.
                let is_address = filter.key.as_deref() != Some(CALLER_KEY)
                    && prefix.contains(['.', ':'])
                    && prefix.chars().all(|char| char.is_ascii_hexdigit() || matches!(char, '.' | ':' | '/'));
                let stored = if is_address { MAX_SHOWN } else { MAX_PREFIX };
                let prefix: String = prefix.chars().take(stored).collect();
                let beyond = format!("{prefix}{}", char::MAX);
                sqlx::query_as(LIST_PREFIX)
                    .bind(revision)
                    .bind(max)
                    .bind(from)
                    .bind(prefix)
                    .bind(beyond)
                    .bind(tier.clone())
                    .bind(filter.key.clone())
                    .fetch_all(pool)
                    .await?
            }
        });
        let more = rows.len() > PAGE_SIZE;
        let now = self.now_seconds();
        let quotas = rows.into_iter().take(PAGE_SIZE).map(|row| row.quota(now));
        let quotas: Vec<Quota> = quotas.collect::<Result<_, _>>()?;
        let next_cursor = quotas.last().filter(|_| more).map(|last| match (&filter.prefix, &filter.tier) {
            (None, None) => last.id.clone(),
            (None, Some(_)) => format!("{}.", last.revision),
            (Some(_), _) => format!("{}.{}", last.revision, last.key_prefix),
        });
        Ok(QuotaPage { quotas, next_cursor })
    }

    /// Returns a page of quotas after an id, ordered by id: each appears once, as it is when its page is read.
    ///
    /// # Errors
    /// [`ControlError`] if the database is unavailable.
    pub async fn export(&self, after: Option<KeyHash>) -> Result<Vec<Quota>, ControlError> {
        let after = after.map_or_else(Vec::new, |hash| hash.0.to_vec());
        let rows: Vec<FullQuotaRow> = on!(&self.db, pool => {
            sqlx::query_as(LIST).bind(after).bind(EXPORT_PAGE).bind(None::<String>).fetch_all(pool).await?
        });
        let now = self.now_seconds();
        rows.into_iter().map(|row| row.quota(now)).collect()
    }

    /// Returns a page of changes since a revision, in order.
    pub(crate) async fn changes(&self, since: i64) -> Result<Vec<ReplicatedQuota>, ControlError> {
        let mut all = Vec::new();
        // Each row is converted before the next one is read: the driver's rows take many times as much memory as
        // ours.
        on!(&self.db, pool => {
            let mut rows = sqlx::query_as::<_, ChangedQuotaRow>(SELECT_SINCE).bind(since).bind(MAX_CHANGES).fetch(pool);
            while let Some(row) = rows.try_next().await? {
                all.push(row.into_replicated()?);
            }
        });
        Ok(all)
    }
}
