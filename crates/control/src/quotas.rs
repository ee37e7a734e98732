//! How agreements are kept: read, written, listed, and read again from a revision on.

use crate::change::{Actor, Changed, Expected, record, writing};
use crate::control::Control;
use crate::db::{ControlError, on};
use crate::key::{Caller, KeyHash, LONGEST_PREFIX, prefix};
use crate::quota::{Quota, QuotaDraft, QuotaOverride, QuotaProblem, tell, tell_millis};
use crate::until::{Until, is_to_come, limits};
use futures_util::TryStreamExt;
use serde::Serialize;
use tollgate_rules::Ruleset;

const ONE: &str =
    "SELECT key_hash, key_prefix, tier, overrides, effective_at, expires_at, reason, author, updated_at,
     deleted, revision, until_tier, until_overrides, until_expires_at FROM quotas WHERE key_hash = $1 AND deleted = 0";

/// Those whose ids begin with the same word: one, or none.
const BEGINS: &str =
    "SELECT key_hash FROM quotas WHERE key_hash >= $1 AND key_hash <= $2 AND deleted = 0 LIMIT 2";

const LIST: &str =
    "SELECT key_hash, key_prefix, tier, overrides, effective_at, expires_at, reason, author, updated_at,
     deleted, revision, until_tier, until_overrides, until_expires_at FROM quotas
     WHERE key_hash > $1 AND deleted = 0 ORDER BY key_hash LIMIT $2";

/// These two are in the order of the index that finds them, so that a page of very many is not sorted: what has changed while
/// somebody turns the pages comes again at the end.
const LIST_TIER: &str =
    "SELECT key_hash, key_prefix, tier, overrides, effective_at, expires_at, reason, author,
     updated_at, deleted, revision, until_tier, until_overrides, until_expires_at FROM quotas
     WHERE revision > $1 AND deleted = 0 AND tier = $3 ORDER BY revision LIMIT $2";

const LIST_PREFIX: &str =
    "SELECT key_hash, key_prefix, tier, overrides, effective_at, expires_at, reason, author,
     updated_at, deleted, revision, until_tier, until_overrides, until_expires_at FROM quotas
     WHERE (key_prefix, revision) > ($3, $1) AND key_prefix >= $4 AND key_prefix < $5 AND deleted = 0
     AND (CAST($6 AS TEXT) IS NULL OR tier = $6) ORDER BY key_prefix, revision LIMIT $2";

/// Deleted rows too: those who follow must forget them.
const SINCE: &str =
    "SELECT key_hash, tier, overrides, effective_at, expires_at, updated_at, deleted, revision,
     until_tier, until_overrides, until_expires_at FROM quotas WHERE revision > $1 ORDER BY revision LIMIT $2";

const UPSERT: &str =
    "INSERT INTO quotas (key_hash, key_prefix, tier, overrides, effective_at, expires_at, reason,
     author, updated_at, deleted, revision, until_tier, until_overrides, until_expires_at)
     VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, 0, $10, $11, $12, $13)
     ON CONFLICT (key_hash) DO UPDATE SET tier = excluded.tier, overrides = excluded.overrides,
     effective_at = excluded.effective_at, expires_at = excluded.expires_at, reason = excluded.reason,
     author = excluded.author, updated_at = excluded.updated_at, deleted = 0, revision = excluded.revision,
     until_tier = excluded.until_tier, until_overrides = excluded.until_overrides,
     until_expires_at = excluded.until_expires_at";

/// About how many rows there are, without counting them.
const ABOUT: [&str; 2] = [
    "SELECT COALESCE(MAX(rowid), 0) FROM quotas",
    "SELECT GREATEST(reltuples::BIGINT, pg_relation_size(oid) / 256) FROM pg_class WHERE oid = 'quotas'::regclass",
];

/// The most that one page of a list has.
pub(crate) const PAGE: usize = 100;
/// The most that an export reads at once.
const EXPORTED: i64 = 2_000;
/// The most that those who follow read at once.
const CHANGES: i64 = 10_000;

/// An agreement, and what acts until it does.
type Row = (
    Vec<u8>,
    String,
    Option<String>,
    String,
    Option<i64>,
    Option<i64>,
    String,
    String,
    i64,
    i64,
    i64,
    Option<String>,
    Option<String>,
    Option<i64>,
);

type Change = (
    Vec<u8>,
    Option<String>,
    String,
    Option<i64>,
    Option<i64>,
    i64,
    i64,
    i64,
    Option<String>,
    Option<String>,
    Option<i64>,
);

/// A row, for those who follow.
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

/// Which agreements to list.
#[derive(Clone, Debug, Default)]
pub struct Wanted {
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
        Some(Self::Change { revision, prefix }).filter(|_| text.len() <= 32 + 4 * LONGEST_PREFIX)
    }

    /// What a list by hash, or one by changes, goes on after. One of another list than was asked for leads to its beginning.
    fn places(this: Option<&Self>) -> (Vec<u8>, i64, String) {
        match this {
            Some(Self::Id(hash)) => (hash.0.to_vec(), -1, String::new()),
            Some(Self::Change { revision, prefix }) => (Vec::new(), *revision, prefix.clone()),
            None => (Vec::new(), -1, String::new()),
        }
    }
}

/// Some agreements, and where the next ones are.
#[derive(Debug, Serialize)]
pub struct Page {
    /// As they come.
    pub quotas: Vec<Quota>,
    /// What to ask for next; nothing, if these are the last.
    pub next_cursor: Option<String>,
}

/// As it is told at a time, in seconds.
fn quota(row: Row, now: i64) -> Result<Quota, ControlError> {
    let until = until(&row, now).map(Until::read).transpose()?;
    let (hash, key_prefix, tier, overrides, effective_at, expires_at, reason, author, updated_at, ..) = row;
    let hash = key_hash(&hash)?;
    Ok(Quota {
        id: hash.to_string(),
        key_prefix,
        tier,
        overrides: limits(&overrides)?,
        effective_at: effective_at.map(tell),
        expires_at: expires_at.map(tell),
        until_effective: until.map(Until::tell),
        reason,
        author,
        updated_at: tell_millis(updated_at),
        revision: row.10,
    })
}

/// What acts now of an agreement, or until it does.
fn acting(row: &Row, now: i64) -> Option<Until<String>> {
    let own = Until { tier: row.2.clone(), overrides: row.3.clone(), expires_at: row.5 };
    own.acting(row.4, Until::of((row.11.clone(), row.12.clone(), row.13)), now)
}

/// What acts until then of an agreement that is to come.
fn until(row: &Row, now: i64) -> Option<Until<String>> {
    acting(row, now).filter(|_| is_to_come(row.4, now))
}

fn key_hash(bytes: &[u8]) -> Result<KeyHash, ControlError> {
    KeyHash::from_slice(bytes).ok_or_else(|| ControlError::Broken("the hash of an API key".to_owned()))
}

fn kept(row: Change) -> Result<Kept, ControlError> {
    let (hash, tier, overrides, effective_at, expires_at, updated_at, deleted, revision, ..) = row;
    let terms = if deleted == 0 {
        let until = Until::of((row.8, row.9, row.10)).map(Until::read).transpose()?;
        Some(KeptTerms { tier, overrides: limits(&overrides)?, effective_at, expires_at, until })
    } else {
        None
    };
    Ok(Kept { hash: key_hash(&hash)?, revision, updated_at, terms })
}

fn told(quota: Option<&Quota>) -> String {
    quota.and_then(|quota| serde_json::to_string(quota).ok()).unwrap_or_default()
}

impl Control {
    /// What is agreed with a caller.
    ///
    /// # Errors
    /// [`ControlError`] if the database does not answer.
    pub async fn quota(&self, caller: impl Into<Caller<'_>>) -> Result<Option<Quota>, ControlError> {
        let hash = self.hasher.of(caller.into());
        let row: Option<Row> = on!(&self.db, pool => {
            sqlx::query_as(ONE).bind(hash.0.to_vec()).fetch_optional(pool).await?
        });
        let now = self.now_seconds();
        row.map(|row| quota(row, now)).transpose()
    }

    /// The whole id of a caller with whom something is agreed, by the word that it begins with ([`KeyHash::first_word`]).
    ///
    /// # Errors
    /// [`ControlError`] if the database does not answer.
    pub async fn quota_id(&self, first_word: u64) -> Result<Option<KeyHash>, ControlError> {
        let ends = [0, u8::MAX].map(|rest| {
            let mut bytes = [rest; 32];
            bytes[..8].copy_from_slice(&first_word.to_be_bytes());
            bytes.to_vec()
        });
        let [from, to] = ends;
        let rows: Vec<(Vec<u8>,)> = on!(&self.db, pool => {
            sqlx::query_as(BEGINS).bind(from).bind(to).fetch_all(pool).await?
        });
        // Two that begin alike cannot be told apart by it.
        let one = rows.first().filter(|_| rows.len() == 1);
        Ok(one.and_then(|(hash,)| KeyHash::from_slice(hash)))
    }

    /// Some agreements, in the order of their ids; those of a tier or a beginning in the order of their last changes.
    ///
    /// # Errors
    /// [`ControlError`] if the database does not answer.
    pub async fn quotas(&self, wanted: &Wanted) -> Result<Page, ControlError> {
        let (hash, revision, from) = Cursor::places(wanted.after.as_ref());
        let most = i64::try_from(PAGE + 1).unwrap_or(i64::MAX);
        let rows: Vec<Row> = on!(&self.db, pool => match (&wanted.prefix, &wanted.tier) {
            (None, None) => sqlx::query_as(LIST).bind(hash).bind(most).fetch_all(pool).await?,
            (None, Some(tier)) => {
                sqlx::query_as(LIST_TIER).bind(revision).bind(most).bind(tier.clone()).fetch_all(pool).await?
            }
            (Some(prefix), tier) => {
                let prefix: String = prefix.chars().take(LONGEST_PREFIX).collect();
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
        let more = rows.len() > PAGE;
        let now = self.now_seconds();
        let quotas = rows.into_iter().take(PAGE).map(|row| quota(row, now));
        let quotas: Vec<Quota> = quotas.collect::<Result<_, _>>()?;
        let next_cursor = quotas.last().filter(|_| more).map(|last| match (&wanted.prefix, &wanted.tier) {
            (None, None) => last.id.clone(),
            (None, Some(_)) => format!("{}.", last.revision),
            (Some(_), _) => format!("{}.{}", last.revision, last.key_prefix),
        });
        Ok(Page { quotas, next_cursor })
    }

    /// Many agreements after one, in the order of their ids: each once, as it is when its page is read.
    ///
    /// # Errors
    /// [`ControlError`] if the database does not answer.
    pub async fn export(&self, after: Option<KeyHash>) -> Result<Vec<Quota>, ControlError> {
        let after = after.map_or_else(Vec::new, |hash| hash.0.to_vec());
        let rows: Vec<Row> = on!(&self.db, pool => {
            sqlx::query_as(LIST).bind(after).bind(EXPORTED).fetch_all(pool).await?
        });
        let now = self.now_seconds();
        rows.into_iter().map(|row| quota(row, now)).collect()
    }

    /// Agrees on something with a caller. It acts on this node when this returns.
    ///
    /// # Errors
    /// The outer one if the database does not do it, or holds something else than is expected; the inner one if what is
    /// sent cannot be.
    pub async fn put_quota(
        &self,
        caller: impl Into<Caller<'_>>,
        draft: QuotaDraft,
        rules: &Ruleset,
        expected: Expected,
        actor: &Actor,
    ) -> Result<Result<Quota, QuotaProblem>, ControlError> {
        let checked = match draft.check(rules, self.clock.now()) {
            Ok(checked) => checked,
            Err(problem) => return Ok(Err(problem)),
        };
        let caller = caller.into();
        let hash = self.hasher.of(caller);
        let overrides = serde_json::to_string(&checked.overrides).unwrap_or_default();
        let (now, seconds) = (self.now_millis(), self.now_seconds());
        let written = writing!(&self.db, |tx, head| {
            let found: Option<Row> =
                sqlx::query_as(ONE).bind(hash.0.to_vec()).fetch_optional(&mut *tx).await?;
            let going_on = found.as_ref().and_then(|row| acting(row, seconds));
            let going_on = going_on.filter(|_| is_to_come(checked.effective_at, seconds));
            let before = found.map(|row| quota(row, seconds)).transpose()?;
            if !expected.meets(before.as_ref().map(|quota| quota.revision)) {
                return Err(ControlError::Changed);
            }
            let key_prefix = match (caller, &before) {
                (Caller::Key(key), _) => prefix(key),
                (Caller::Id(_), Some(before)) => before.key_prefix.clone(),
                (Caller::Id(_), None) => return Err(ControlError::Unknown("quota with this id")),
            };
            let after = Quota {
                id: hash.to_string(),
                key_prefix,
                tier: checked.tier.clone(),
                overrides: checked.overrides.clone(),
                effective_at: checked.effective_at.map(tell),
                expires_at: checked.expires_at.map(tell),
                until_effective: going_on.clone().map(Until::read).transpose()?.map(Until::tell),
                reason: checked.reason.clone(),
                author: checked.author.clone().unwrap_or_else(|| actor.name.clone()),
                updated_at: tell_millis(now),
                revision: head.0,
            };
            let (until_tier, until_overrides, until_expires_at) = Until::columns(going_on);
            sqlx::query(UPSERT)
                .bind(hash.0.to_vec())
                .bind(after.key_prefix.clone())
                .bind(after.tier.clone())
                .bind(overrides.clone())
                .bind(checked.effective_at)
                .bind(checked.expires_at)
                .bind(after.reason.clone())
                .bind(after.author.clone())
                .bind(now)
                .bind(head.0)
                .bind(until_tier)
                .bind(until_overrides)
                .bind(until_expires_at)
                .execute(&mut *tx)
                .await?;
            let changed = Changed {
                action: "quota.put",
                target: &after.id,
                before: told(before.as_ref()),
                after: told(Some(&after)),
            };
            record!(tx, head, now, actor, &changed);
            after
        });
        self.act().await;
        Ok(Ok(written))
    }

    /// Ends an agreement.
    ///
    /// # Errors
    /// [`ControlError::Unknown`] if there is none, [`ControlError::Changed`] if it is another than expected, or the
    /// database's own.
    pub async fn delete_quota(
        &self,
        caller: impl Into<Caller<'_>>,
        expected: Expected,
        actor: &Actor,
    ) -> Result<(), ControlError> {
        let hash = self.hasher.of(caller.into());
        let (now, seconds) = (self.now_millis(), self.now_seconds());
        writing!(&self.db, |tx, head| {
            let found: Option<Row> =
                sqlx::query_as(ONE).bind(hash.0.to_vec()).fetch_optional(&mut *tx).await?;
            let before = found.map(|row| quota(row, seconds)).transpose()?;
            let before = before.ok_or(ControlError::Unknown("quota of this caller"))?;
            if !expected.meets(Some(before.revision)) {
                return Err(ControlError::Changed);
            }
            sqlx::query("UPDATE quotas SET deleted = 1, updated_at = $2, revision = $3 WHERE key_hash = $1")
                .bind(hash.0.to_vec())
                .bind(now)
                .bind(head.0)
                .execute(&mut *tx)
                .await?;
            let changed = Changed {
                action: "quota.delete",
                target: &before.id,
                before: told(Some(&before)),
                after: String::new(),
            };
            record!(tx, head, now, actor, &changed);
        });
        self.act().await;
        Ok(())
    }

    /// About how many agreements there are.
    pub(crate) async fn about_how_many(&self) -> Result<usize, ControlError> {
        let sql = self.own_words(ABOUT);
        let (rows,): (i64,) = on!(&self.db, pool => sqlx::query_as(sql).fetch_one(pool).await?);
        Ok(usize::try_from(rows).unwrap_or(0))
    }

    /// What has changed since a revision, in order; not all at once.
    pub(crate) async fn changes(&self, since: i64) -> Result<Vec<Kept>, ControlError> {
        let mut all = Vec::new();
        // A row is let go before the next one comes: the database's own take many times as much memory as ours.
        on!(&self.db, pool => {
            let mut rows = sqlx::query_as(SINCE).bind(since).bind(CHANGES).fetch(pool);
            while let Some(row) = rows.try_next().await? {
                all.push(kept(row)?);
            }
        });
        Ok(all)
    }
}
