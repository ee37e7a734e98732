//! `tollgate why`: explains a past decision, through a running server.

use crate::admin_client::{self, AdminFlags, Client, encoded};
use crate::cli::{output, print};
use anyhow::Context;
use clap::builder::NonEmptyStringValueParser;
use clap::{ArgGroup, Args};
use hyper::Method;
use serde_json::Value;
use std::io::Write;
use std::process::ExitCode;
use tollgate_core::{Clock, SystemClock};

/// Maximum distance of a decision from the time of `--at`, in milliseconds.
const MAX_DISTANCE: i64 = 60_000;

#[derive(Debug, Args)]
#[command(group = ArgGroup::new("which").required(true).args(["id", "key"]))]
pub(crate) struct WhyFlags {
    #[command(flatten)]
    admin: AdminFlags,
    /// Decision ID, from `X-RateLimit-Decision-Id` or `decision_id` of a response.
    #[arg(value_name = "ID", conflicts_with = "at", value_parser = NonEmptyStringValueParser::new())]
    id: Option<String>,
    /// Caller: an API key or another attribute's value. Explains the latest denial unless --at is set.
    #[arg(long, value_name = "KEY", value_parser = NonEmptyStringValueParser::new())]
    key: Option<String>,
    /// Time of the decision: 14:32:17 (the most recent), 2027-01-31T14:32:17, or either with an offset such as +02:00;
    /// without one in UTC. Explains the nearest denial, else the nearest decision.
    #[arg(long, value_name = "TIME", requires = "key")]
    at: Option<String>,
}

pub(crate) fn why(flags: &WhyFlags) -> anyhow::Result<ExitCode> {
    admin_client::run(&flags.admin, async |client: Client| {
        let id = match (&flags.id, &flags.key) {
            (Some(id), _) => id.clone(),
            (None, key) => find(&client, key.as_deref().unwrap_or_default(), flags.at.as_deref()).await?,
        };
        let path = format!("/admin/v1/decisions/{}/why", encoded(&id));
        let response = client.request(Method::GET, &path, None).await?;
        if flags.admin.is_json() {
            print(&response)?;
            return Ok(ExitCode::SUCCESS);
        }
        let mut out = output::styled();
        for line in response["explanation"].as_array().into_iter().flatten().filter_map(Value::as_str) {
            writeln!(out, "{line}")?;
        }
        writeln!(out, "Decision {id}")?;
        Ok(ExitCode::SUCCESS)
    })
}

/// Returns the id of the decision to explain: a denial, if there is one.
async fn find(client: &Client, key: &str, at: Option<&str>) -> anyhow::Result<String> {
    let now = i64::try_from(SystemClock::new().now().as_micros() / 1_000)?;
    let at = at.map(|text| time(text, now)).transpose()?;
    for verdict in ["&verdict=deny", ""] {
        let log = LogQuery { client, query: format!("key={}{verdict}", encoded(key)) };
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
        "no decision on this key in the node's decision log{when}; the log keeps the latest denials and a sample of allowed \
         requests"
    )
}

/// Query of a node's decision log for one caller.
struct LogQuery<'a> {
    client: &'a Client,
    query: String,
}

struct Found {
    id: String,
    /// Time of the decision, in milliseconds since 1970.
    at: i64,
}

impl LogQuery<'_> {
    /// Returns the latest decision; `more` adds query parameters.
    async fn latest(&self, more: &str) -> anyhow::Result<Option<Found>> {
        let path = format!("/admin/v1/decisions?{}{more}&limit=1", self.query);
        let response = self.client.request(Method::GET, &path, None).await?;
        let decisions = response["decisions"].as_array().context("invalid response: no decisions")?;
        let Some(first) = decisions.first() else { return Ok(None) };
        let made = first["at"].as_str().and_then(|text| text.parse::<jiff::Timestamp>().ok());
        let (id, made) = first["id"].as_str().zip(made).context("invalid response: no decisions")?;
        Ok(Some(Found { id: id.to_owned(), at: made.as_millisecond() }))
    }

    /// Returns the latest decision from the millisecond `first` to the end of the millisecond `last`.
    async fn latest_within(&self, first: i64, last: i64) -> anyhow::Result<Option<Found>> {
        let written = |micros: Option<i64>| {
            let time = micros.and_then(|micros| jiff::Timestamp::from_microsecond(micros).ok());
            time.map(|time| encoded(&time.to_string())).context("--at: time out of range")
        };
        let from = written(first.checked_mul(1_000))?;
        let to = written(last.checked_mul(1_000).and_then(|micros| micros.checked_add(999)))?;
        self.latest(&format!("&from={from}&to={to}")).await
    }

    /// Returns the first decision in these milliseconds. The log returns the latest first, so the time before it is
    /// bisected until it contains none; the number of requests does not depend on the number of decisions.
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

    /// Returns the decision nearest to `at`, within a minute.
    async fn nearest(&self, at: i64) -> anyhow::Result<Option<Found>> {
        let before = self.latest_within(at.saturating_sub(MAX_DISTANCE), at).await?;
        let after = self.first_within(at.saturating_add(1), at.saturating_add(MAX_DISTANCE)).await?;
        Ok(before.into_iter().chain(after).min_by_key(|found| found.at.abs_diff(at)))
    }
}

/// Parses a date and time, or a time of day (its most recent occurrence), in UTC unless it has an offset. Returns
/// milliseconds since 1970.
fn time(text: &str, now: i64) -> anyhow::Result<i64> {
    const DAY: i64 = 86_400_000;
    let read = |text: &str| text.parse::<jiff::Timestamp>().map(jiff::Timestamp::as_millisecond);
    if let Ok(whole) = read(text) {
        return Ok(whole);
    }
    // A parser that needs no offset accepts and ignores other text, such as a date or the name of a zone.
    let is_plain = text.contains(':') && text.chars().all(|c| c.is_ascii_digit() || ":.+-TtZz ".contains(c));
    let is_of_day = text.as_bytes().get(2) == Some(&b':');
    let whole = if is_of_day { format!("1970-01-01T{text}") } else { text.to_owned() };
    let found = read(&whole).or_else(|_| read(&format!("{whole}Z"))).ok().filter(|_| is_plain);
    let found = found.map(|at| if is_of_day { now - (now - at).rem_euclid(DAY) } else { at });
    found.with_context(|| {
        format!(
            "--at {text}: not a time; use 14:32:17 or 2027-01-31T14:32:17 (UTC), or add an offset such as \
             14:32:17+02:00; zone names are not supported"
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 2027-01-31T14:32:17Z
    const TIME: i64 = 1_801_405_937_000;
    const HOUR: i64 = 3_600_000;

    fn at(text: &str) -> Option<i64> {
        time(text, TIME).ok()
    }

    #[test]
    fn times_are_read_as_people_write_them() {
        for whole in [
            "2027-01-31T14:32:17Z",
            "2027-01-31T15:32:17+01:00",
            "2027-01-31T14:32:17",
            "2027-01-31 14:32:17",
            "2027-01-31t14:32:17z",
            "2027-01-31T12:02:17-02:30",
            "2027-01-31T23:32:17+09:00[Asia/Tokyo]",
        ] {
            assert_eq!(at(whole), Some(TIME), "{whole}");
        }
        assert_eq!(at("2020-01-01T20:43:35"), Some(1_577_911_415_000), "the date is kept");
        assert_eq!(at("1999-12-31 20:43"), Some(946_672_980_000));
    }

    #[test]
    fn a_time_of_day_is_the_last_one_that_was() {
        for (text, expected) in [
            ("14:32:17", TIME),
            ("14:32:17Z", TIME),
            ("14:32:17.000", TIME),
            ("14:32", TIME - 17_000),
            ("14:32:18", TIME + 1_000 - 24 * HOUR),
            ("14:32:18.5Z", TIME + 1_500 - 24 * HOUR),
            ("19:32:17+05:00", TIME),
            ("09:32:17-05:00", TIME),
            ("14:32:17+05:00", TIME - 5 * HOUR),
            ("14:32:17-05:00", TIME - 19 * HOUR),
            ("00:32:17+10:00", TIME),
        ] {
            assert_eq!(at(text), Some(expected), "{text}");
        }
    }

    #[test]
    fn ambiguous_times_are_rejected() {
        for text in [
            "",
            "soon",
            "14",
            "1432",
            "2027",
            "25:00",
            "14:32:17[Asia/Tokyo]",
            "14:32:17 CET",
            "2027-01-31",
            "2027-02-30T14:32:17",
            "2027-01-31T14:32:17[Asia/Tokyo]",
            "14:32:17+",
            "14:32:17-5",
            "14:32:17ZZ",
            "Z",
        ] {
            assert_eq!(at(text), None, "{text}");
        }
        let error = time("14:32:17[Asia/Tokyo]", TIME).expect_err("no zone").to_string();
        assert!(
            error.contains("--at 14:32:17[Asia/Tokyo]: not a time") && error.contains("zone names"),
            "{error}"
        );
    }
}
