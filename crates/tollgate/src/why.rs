//! `tollgate why`: one decision in words, by way of a running server.

use crate::cli::print;
use crate::client::{self, AdminFlags, Client, encoded};
use anyhow::Context;
use clap::Args;
use hyper::Method;
use serde_json::Value;
use std::io::Write;
use std::process::ExitCode;
use tollgate_core::{Clock, SystemClock};

/// How far from the time that is asked about a decision may lie, in milliseconds.
const NEAR: i64 = 60_000;

#[derive(Debug, Args)]
pub(crate) struct WhyFlags {
    #[command(flatten)]
    admin: AdminFlags,
    /// The decision's id: the caller has it in `X-RateLimit-Decision-Id` or `decision_id`.
    #[arg(value_name = "ID", required_unless_present = "key", conflicts_with_all = ["key", "at"])]
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

/// The decision that is meant.
async fn find(client: &Client, key: &str, at: Option<&str>) -> anyhow::Result<String> {
    let mut path = format!("/admin/v1/decisions?key={}&limit=1000", encoded(key));
    let at = at.map(time).transpose()?;
    if let Some(at) = at {
        let written = |millis: i64| {
            let time = jiff::Timestamp::from_millisecond(at + millis).map(|time| time.to_string());
            time.context("--at: there is no such time")
        };
        path.push_str(&format!("&from={}&to={}", encoded(&written(-NEAR)?), encoded(&written(NEAR)?)));
    }
    let found = client.ask(Method::GET, &path, None).await?;
    let found = found["decisions"].as_array().context("the server does not tell of decisions")?;
    // The latest stand first.
    let rank = |decision: &&Value| {
        let made: Option<jiff::Timestamp> = decision["at"].as_str().and_then(|text| text.parse().ok());
        let off = at.zip(made).map_or(0, |(at, made)| (made.as_millisecond() - at).abs());
        (decision["verdict"] != "deny", off)
    };
    let best = found.iter().min_by_key(rank).and_then(|decision| decision["id"].as_str());
    best.map(str::to_owned).with_context(|| {
        let when = if at.is_some() { " within a minute of that time" } else { "" };
        format!(
            "no decision about this key is in the node's log{when}; it keeps every denial and some of what it allows, \
             and only the latest of them"
        )
    })
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
