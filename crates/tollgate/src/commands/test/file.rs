//! Test file format: one case, or a list of them. Steps know their line, which failures name.

use serde::Deserialize;
use serde::de::{self, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_saphyr::Spanned;
use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use tollgate_core::TimeDelta;

/// Cases of a test file.
#[derive(Debug)]
pub(crate) struct File(pub(crate) Vec<Case>);

impl<'de> Deserialize<'de> for File {
    fn deserialize<D: Deserializer<'de>>(decoder: D) -> Result<Self, D::Error> {
        struct FileVisitor;
        impl<'de> Visitor<'de> for FileVisitor {
            type Value = File;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a test case, or a list of them")
            }
            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<File, A::Error> {
                Case::deserialize(de::value::MapAccessDeserializer::new(map)).map(|case| File(vec![case]))
            }
            fn visit_seq<A: SeqAccess<'de>>(self, list: A) -> Result<File, A::Error> {
                Vec::deserialize(de::value::SeqAccessDeserializer::new(list)).map(File)
            }
        }
        decoder.deserialize_any(FileVisitor)
    }
}

/// Test case: a rule set and the steps to run against it.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Case {
    pub(crate) name: Option<String>,
    pub(crate) rules: Option<String>,
    pub(crate) rules_file: Option<PathBuf>,
    #[serde(default)]
    pub(crate) extra_rules: Vec<String>,
    pub(crate) profile: Option<crate::cli::ProfileName>,
    #[serde(default)]
    pub(crate) global_shadow: bool,
    #[serde(default)]
    pub(crate) start: u64,
    pub(crate) error: Option<String>,
    #[serde(default)]
    pub(crate) steps: Vec<Spanned<Step>>,
}

/// Step: signals, one request, or the end of a reservation, and its expected result.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Step {
    /// Time by which the clock advances before the request, each time that it is sent.
    pub(crate) advance: Option<Advance>,
    /// Signals that are reported before the request, whatever their sources.
    #[serde(default)]
    pub(crate) signals: BTreeMap<String, f64>,
    pub(crate) domain: Option<String>,
    pub(crate) hits: Option<u32>,
    pub(crate) descriptors: Option<Vec<StepDescriptor>>,
    pub(crate) attributes: Option<BTreeMap<String, Scalar>>,
    pub(crate) cost: Option<u64>,
    /// Reserve the request's cost under this name, instead of charging it for good.
    pub(crate) reserve: Option<Scalar>,
    /// Time to settle or cancel the reservation.
    pub(crate) deadline_ms: Option<u64>,
    /// Settle the reservation of this name with `cost`.
    pub(crate) settle: Option<Scalar>,
    /// Cancel the reservation of this name.
    pub(crate) cancel: Option<Scalar>,
    /// Number of times the request is sent; the expectation applies to the last.
    pub(crate) repeat: Option<u32>,
    #[serde(default)]
    pub(crate) expect: Expect,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct StepDescriptor {
    #[serde(default)]
    pub(crate) entries: Vec<(Scalar, Scalar)>,
    /// Number of hits; a negative number refunds.
    pub(crate) hits: Option<i64>,
    pub(crate) limit: Option<StepLimit>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct StepLimit {
    pub(crate) requests_per_unit: u32,
    pub(crate) unit: String,
}

/// Expected result of a step; omitted fields are not compared.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Expect {
    pub(crate) overall: Option<Overall>,
    pub(crate) error: Option<String>,
    pub(crate) statuses: Option<Vec<ExpectStatus>>,
    pub(crate) denied_by: Option<String>,
    pub(crate) degraded_by: Option<String>,
    pub(crate) warned_by: Option<String>,
    pub(crate) delay_ms: Option<u64>,
    pub(crate) retry_after_ms: Option<u64>,
    /// Percent of each tier's limits that apply, where limits follow signals.
    pub(crate) limits_percent: Option<BTreeMap<String, f64>>,
    /// Priority by the domain's `overload` section.
    pub(crate) priority: Option<String>,
    /// Guarantee of the request's tenant by that section: `5% each`, or `none`.
    pub(crate) guarantee: Option<String>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ExpectStatus {
    pub(crate) code: Option<StatusCode>,
    pub(crate) remaining: Option<u64>,
    pub(crate) limit: Option<u64>,
    pub(crate) unit: Option<String>,
    pub(crate) reset: Option<u64>,
    pub(crate) name: Option<String>,
    pub(crate) has_limit: Option<bool>,
}

/// Expected overall result of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub(crate) enum Overall {
    Ok,
    OverLimit,
    Error,
}

impl Overall {
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Ok => "OK",
            Self::OverLimit => "OVER_LIMIT",
            Self::Error => "ERROR",
        }
    }
}

impl TryFrom<String> for Overall {
    type Error = String;
    fn try_from(word: String) -> Result<Self, String> {
        let known = [Self::Ok, Self::OverLimit, Self::Error];
        known
            .into_iter()
            .find(|known| known.name().eq_ignore_ascii_case(&word))
            .ok_or_else(|| format!("unknown result `{word}`; use OK, OVER_LIMIT or ERROR"))
    }
}

/// Expected code of a descriptor's status.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub(crate) enum StatusCode {
    Ok,
    OverLimit,
    Unknown,
}

impl StatusCode {
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Ok => "OK",
            Self::OverLimit => "OVER_LIMIT",
            Self::Unknown => "UNKNOWN",
        }
    }
}

impl TryFrom<String> for StatusCode {
    type Error = String;
    fn try_from(word: String) -> Result<Self, String> {
        let known = [Self::Ok, Self::OverLimit, Self::Unknown];
        known
            .into_iter()
            .find(|known| known.name().eq_ignore_ascii_case(&word))
            .ok_or_else(|| format!("unknown code `{word}`; use OK, OVER_LIMIT or UNKNOWN"))
    }
}

/// Text, also if it looks like a number or a boolean in YAML.
#[derive(Debug)]
pub(crate) struct Scalar(pub(crate) String);

impl<'de> Deserialize<'de> for Scalar {
    fn deserialize<D: Deserializer<'de>>(decoder: D) -> Result<Self, D::Error> {
        String::deserialize(decoder).map(Self)
    }
}

/// Time by which the clock advances: `19s`, `250ms`, `2h`, or plain seconds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Advance(pub(crate) TimeDelta);

impl<'de> Deserialize<'de> for Advance {
    fn deserialize<D: Deserializer<'de>>(decoder: D) -> Result<Self, D::Error> {
        let text = String::deserialize(decoder)?;
        parse_span(&text).map(Self).ok_or_else(|| {
            de::Error::custom(format!("`{text}` is not a time; write one such as 19s, 250ms or 2h"))
        })
    }
}

fn parse_span(text: &str) -> Option<TimeDelta> {
    let text = text.trim();
    let number = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let scale: u64 = match text[number.len()..].trim() {
        "" | "s" => 1_000_000,
        "us" => 1,
        "ms" => 1_000,
        "m" => 60_000_000,
        "h" => 3_600_000_000,
        "d" => 86_400_000_000,
        _ => return None,
    };
    let (whole, fraction) = number.trim().split_once('.').unwrap_or((number.trim(), ""));
    let whole: u64 = whole.parse().ok()?;
    let mut micros = whole.checked_mul(scale)?;
    if !fraction.is_empty() {
        let parts: u64 = fraction.parse().ok()?;
        micros += parts.checked_mul(scale)? / 10_u64.checked_pow(u32::try_from(fraction.len()).ok()?)?;
    }
    Some(TimeDelta::from_micros(micros))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_read_as_people_write_them() {
        let micros = |text| parse_span(text).map(TimeDelta::as_micros);
        assert_eq!(micros("19s"), Some(19_000_000));
        assert_eq!(micros("19"), Some(19_000_000));
        assert_eq!(micros("0.5"), Some(500_000));
        assert_eq!(micros("250ms"), Some(250_000));
        assert_eq!(micros("2h"), Some(7_200_000_000));
        assert_eq!(micros("soon"), None);
        assert_eq!(micros("-1s"), None);
    }
}
