//! Rows of consumption as readers see them: the sum over all processes, with an id that stays the same.

use crate::db::time::format_time;
use crate::error::ControlError;
use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use jiff::ToSpan;
use jiff::tz::TimeZone;
use ring::digest;
use serde::Serialize;
use tollgate_replica::KeyHash;
use utoipa::ToSchema;

/// Length of an hour, in seconds.
pub(crate) const HOUR: i64 = 3_600;

/// Length of the periods that consumption is added up for. Both begin in UTC.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Granularity {
    /// Hours.
    #[default]
    Hour,
    /// Calendar months.
    Month,
}

impl Granularity {
    /// Returns the name used in requests and rows.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Hour => "hour",
            Self::Month => "month",
        }
    }

    /// Returns the start of the period that contains a time, in seconds.
    #[must_use]
    pub fn start(self, at: i64) -> i64 {
        match self {
            Self::Hour => at - at.rem_euclid(HOUR),
            Self::Month => month(at, 0),
        }
    }

    /// Returns the start of the next period.
    #[must_use]
    pub fn next(self, start: i64) -> i64 {
        match self {
            Self::Hour => start.saturating_add(HOUR),
            Self::Month => month(start, 1),
        }
    }
}

/// Returns the start of the month that contains a time, and of one of the next.
fn month(at: i64, later: i64) -> i64 {
    let at = jiff::Timestamp::from_second(at).unwrap_or_default().to_zoned(TimeZone::UTC).date();
    let first = at.first_of_month().saturating_add(later.months());
    first.to_zoned(TimeZone::UTC).map_or(i64::MAX, |start| start.timestamp().as_second())
}

/// What one caller consumed of one rule in one hour or month.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, ToSchema)]
pub struct ConsumptionRow {
    /// Id of the row: the same whenever it is read, so that a reader replaces what it has.
    pub id: String,
    /// Length of the period.
    pub granularity: Granularity,
    /// Start of the period, in RFC 3339.
    #[schema(format = DateTime)]
    pub start: String,
    /// End of the period, in RFC 3339.
    #[schema(format = DateTime)]
    pub end: String,
    /// Domain of the rule.
    pub domain: String,
    /// Name of the rule.
    pub rule: String,
    /// Where the units come from: the attribute of `cost`, `cost` for the request's own cost, `requests` for a fixed cost
    /// of one, or `fixed`.
    pub meter: String,
    /// Attribute that names the caller; empty for callers that could not be told apart.
    pub key: String,
    /// The caller, masked as in the decision log.
    pub caller: String,
    /// Keyed hash of the caller's value: for API keys, the id of their quota.
    pub caller_id: String,
    /// Units of all admitted requests, refunds subtracted.
    pub units: i64,
    /// Number of admitted requests.
    pub requests: i64,
    /// Grows whenever the row changes; of two copies, the higher one is newer.
    pub version: i64,
    /// Whether the period has ended. Such a row changes only by corrections.
    pub closed: bool,
}

/// The order of rows, and the end of a page.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ConsumptionCursor {
    /// Start of the period.
    pub(crate) start: i64,
    pub(crate) caller: Vec<u8>,
    pub(crate) key: String,
    pub(crate) domain: String,
    pub(crate) rule: String,
    pub(crate) meter: String,
}

impl ConsumptionCursor {
    /// Returns the position before all rows of the period that begins at `start`.
    pub(crate) fn before(start: i64) -> Self {
        // Every caller is longer than none.
        Self { start, ..Self::default() }
    }

    /// Parses a page's `next_cursor`.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        type Fields = (i64, Vec<u8>, String, String, String, String);
        let bytes = URL_SAFE_NO_PAD.decode(text).ok()?;
        let (start, caller, key, domain, rule, meter): Fields = serde_json::from_slice(&bytes).ok()?;
        // PostgreSQL has no text with this character.
        let has_null = [&key, &domain, &rule, &meter].iter().any(|text| text.contains('\0'));
        (!has_null).then_some(Self { start, caller, key, domain, rule, meter })
    }
}

impl std::fmt::Display for ConsumptionCursor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { start, caller, key, domain, rule, meter } = self;
        let fields = serde_json::json!([start, caller, key, domain, rule, meter]);
        f.write_str(&URL_SAFE_NO_PAD.encode(fields.to_string()))
    }
}

/// A sum over processes, as selected: caller, its key, domain, rule, meter, display, units, requests, change.
pub(crate) type SumRow = (Vec<u8>, String, String, String, String, String, i64, i64, i64);

/// Returns the row and its position.
pub(crate) fn from_sum(
    granularity: Granularity,
    start: i64,
    sum: SumRow,
    now: i64,
) -> Result<(ConsumptionRow, ConsumptionCursor), ControlError> {
    let (caller, key, domain, rule, meter, text, units, requests, version) = sum;
    let hash = KeyHash::from_slice(&caller);
    let hash = hash.ok_or_else(|| ControlError::Corrupt("a caller of consumption".to_owned()))?;
    let end = granularity.next(start);
    let position = ConsumptionCursor { start, caller, key, domain, rule, meter };
    let row = ConsumptionRow {
        id: row_id(granularity, &position),
        granularity,
        start: format_time(start),
        end: format_time(end),
        domain: position.domain.clone(),
        rule: position.rule.clone(),
        meter: position.meter.clone(),
        key: position.key.clone(),
        caller: text,
        caller_id: hash.to_string(),
        units,
        requests,
        version,
        closed: end <= now,
    };
    Ok((row, position))
}

/// Hashes what identifies a row. Each part has its length before it, so that different rows never encode alike.
fn row_id(granularity: Granularity, position: &ConsumptionCursor) -> String {
    let ConsumptionCursor { start, caller, key, domain, rule, meter } = position;
    let mut hash = digest::Context::new(&digest::SHA256);
    let start = start.to_be_bytes();
    let texts = [granularity.name(), key, domain, rule, meter].map(str::as_bytes);
    for part in texts.into_iter().chain([&start[..], caller]) {
        hash.update(&(part.len() as u64).to_be_bytes());
        hash.update(part);
    }
    hash.finish().as_ref().iter().take(16).map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seconds(text: &str) -> i64 {
        text.parse::<jiff::Timestamp>().expect("a time").as_second()
    }

    #[test]
    fn hours_and_months_begin_in_utc() {
        let at = seconds("2028-02-29T23:59:59Z");
        assert_eq!(Granularity::Hour.start(at), seconds("2028-02-29T23:00:00Z"));
        assert_eq!(Granularity::Month.start(at), seconds("2028-02-01T00:00:00Z"));
        assert_eq!(Granularity::Month.next(Granularity::Month.start(at)), seconds("2028-03-01T00:00:00Z"));
        let december = seconds("2026-12-01T00:00:00Z");
        assert_eq!(Granularity::Month.start(december), december);
        assert_eq!(Granularity::Month.next(december), seconds("2027-01-01T00:00:00Z"));
    }

    #[test]
    fn a_cursor_is_read_as_it_was_written() {
        let cursor = ConsumptionCursor {
            start: 7_200,
            caller: vec![0, 255, 7],
            key: "api_key".to_owned(),
            domain: "d".to_owned(),
            rule: "a/b=\"c\"".to_owned(),
            meter: "cost".to_owned(),
        };
        assert_eq!(ConsumptionCursor::parse(&cursor.to_string()), Some(cursor));
        for wrong in ["", "x", "W10", "bnVsbA"] {
            assert_eq!(ConsumptionCursor::parse(wrong), None, "{wrong}");
        }
    }
}
