//! `tollgate why`: one decision in words, by way of a running server.

use crate::cli::print;
use crate::client::{self, AdminFlags, Client, encoded};
use anyhow::Context;
use clap::{ArgGroup, Args};
use hyper::Method;
use serde_json::Value;
use std::io::Write;
use std::process::ExitCode;
use tollgate_core::{Clock, SystemClock};

/// How far from the time that is asked about a decision may lie, in milliseconds.
const NEAR: i64 = 60_000;

#[derive(Debug, Args)]
#[command(group = ArgGroup::new("which").required(true).args(["id", "key"]))]
pub(crate) struct WhyFlags {
    #[command(flatten)]
    admin: AdminFlags,
    /// The decision's id: the caller has it in `X-RateLimit-Decision-Id` or `decision_id`.
    #[arg(value_name = "ID", conflicts_with = "at")]
    id: Option<String>,
    /// The caller: an API key or another attribute's value. The last denial, unless --at says when.
    #[arg(long, value_name = "KEY")]
    key: Option<String>,
    /// About when, in UTC: 14:32:17, or 2027-01-31T14:32:17Z. The decision nearest to it is told, a denial first.
    #[arg(long, value_name = "TIME", requires = "key")]
    at: Option<String>,
}

pub(crate) fn why(flags: &WhyFlags) -> anyhow::Result<ExitCode> {
    client::run(&flags.admin, async |client: Client| {
        let id = match (&flags.id, &flags.key) {
            (Some(id), _) => id.clone(),
            (None, key) => find(&client, key.as_deref().unwrap_or_default(), flags.at.as_deref()).await?,
        };
        let path = format!("/admin/v1/decisions/{}/why", encoded(&id));
        let told = client.ask(Method::GET, &path, None).await?;
        if flags.admin.is_json() {
            print(&told)?;
            return Ok(ExitCode::SUCCESS);
        }
        let mut out = std::io::stdout().lock();
        for line in told["explanation"].as_array().into_iter().flatten().filter_map(Value::as_str) {
            writeln!(out, "{line}")?;
        }
        writeln!(out, "Decision {id}")?;
        Ok(ExitCode::SUCCESS)
    })
}

/// The decision that is meant: a denial, if there is one.
async fn find(client: &Client, key: &str, at: Option<&str>) -> anyhow::Result<String> {
    let at = at.map(time).transpose()?;
    for verdict in ["&verdict=deny", ""] {
        let log = Log { client, query: format!("key={}{verdict}", encoded(key)) };
        let found = match at {
            None => log.latest("").await?,
            Some(at) => log.nearest(at).await?,
        };
        if let Some(found) = found {
            return Ok(found.id);
        }
    }
    let when = if at.is_some() { " within a minute of that time" } else { "" };
    anyhow::bail!(
        "no decision about this key is in the node's log{when}; it keeps every denial and some of what it allows, \
         and only the latest of them"
    )
}

/// What a node's log has of somebody.
struct Log<'a> {
    client: &'a Client,
    query: String,
}

struct Found {
    id: String,
    /// In milliseconds since 1970.
    at: i64,
}

impl Log<'_> {
    /// The latest, with more said about it.
    async fn latest(&self, more: &str) -> anyhow::Result<Option<Found>> {
        let path = format!("/admin/v1/decisions?{}{more}&limit=1", self.query);
        let told = self.client.ask(Method::GET, &path, None).await?;
        let told = told["decisions"].as_array().context("the server does not tell of decisions")?;
        let Some(first) = told.first() else { return Ok(None) };
        let made = first["at"].as_str().and_then(|text| text.parse::<jiff::Timestamp>().ok());
        let (id, made) = first["id"].as_str().zip(made).context("the server does not tell of decisions")?;
        Ok(Some(Found { id: id.to_owned(), at: made.as_millisecond() }))
    }

    /// The latest from the first of these milliseconds to the end of the last.
    async fn latest_within(&self, first: i64, last: i64) -> anyhow::Result<Option<Found>> {
        let written = |micros: Option<i64>| {
            let time = micros.and_then(|micros| jiff::Timestamp::from_microsecond(micros).ok());
            time.map(|time| encoded(&time.to_string())).context("--at: there is no such time")
        };
        let from = written(first.checked_mul(1_000))?;
        let to = written(last.checked_mul(1_000).and_then(|micros| micros.checked_add(999)))?;
        self.latest(&format!("&from={from}&to={to}")).await
    }

    /// The first in these milliseconds. The log tells the latest first: what lies before is halved until nothing does, however
    /// many there are.
    async fn first_within(&self, mut first: i64, last: i64) -> anyhow::Result<Option<Found>> {
        let mut best = self.latest_within(first, last).await?;
        let mut last = best.as_ref().map_or(first, |found| found.at) - 1;
        while first <= last {
            let middle = first + (last - first) / 2;
            match self.latest_within(first, middle).await? {
                Some(found) => {
                    last = found.at.min(middle) - 1;
                    best = Some(found);
                }
                None => first = middle + 1,
            }
        }
        Ok(best)
    }

    /// The one nearest to a time, of those within a minute.
    async fn nearest(&self, at: i64) -> anyhow::Result<Option<Found>> {
        let before = self.latest_within(at.saturating_sub(NEAR), at).await?;
        let after = self.first_within(at.saturating_add(1), at.saturating_add(NEAR)).await?;
        Ok(before.into_iter().chain(after).min_by_key(|found| found.at.abs_diff(at)))
    }
}

/// A time of today, or of yesterday if it has not come yet; or a whole one. In milliseconds since 1970.
fn time(text: &str) -> anyhow::Result<i64> {
    let whole: Result<jiff::Timestamp, _> = text.parse();
    if let Ok(whole) = whole {
        return Ok(whole.as_millisecond());
    }
    let of_day: jiff::civil::Time =
        text.parse().ok().with_context(|| format!("--at {text}: write a time such as 14:32:17"))?;
    let micros = i64::try_from(SystemClock::new().now().as_micros())?;
    let now = jiff::Timestamp::from_microsecond(micros)?;
    let today =
        now.to_zoned(jiff::tz::TimeZone::UTC).date().to_datetime(of_day).to_zoned(jiff::tz::TimeZone::UTC)?;
    let at = today.timestamp().as_millisecond();
    const DAY: i64 = 86_400_000;
    Ok(if at > now.as_millisecond() { at - DAY } else { at })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_read_as_people_write_them() {
        assert_eq!(time("2027-01-31T14:32:17Z").ok(), Some(1_801_405_937_000));
        assert_eq!(time("2027-01-31T15:32:17+01:00").ok(), Some(1_801_405_937_000));
        let midnight = time("00:00:00").expect("a time");
        assert_eq!(midnight % 86_400_000, 0);
        assert_eq!(time("14:32:17").expect("a time").rem_euclid(86_400_000), 52_337_000);
        assert!(time("soon").is_err());
    }
}
