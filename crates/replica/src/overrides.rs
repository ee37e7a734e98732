//! Limit override of a quota, which replaces a rule's limit, as it is sent and stored.

use serde::{Deserialize, Serialize};
use tollgate_rules::{Override, OverrideRate, Replaces};

/// A limit that replaces a rule's.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "WrittenOverride", into = "WrittenOverride")]
pub struct QuotaOverride(pub Override);

/// An override in JSON. Fields that older versions do not know are written only where they say something.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema), schema(as = Override))]
#[serde(deny_unknown_fields)]
struct WrittenOverride {
    /// The rule whose limit is replaced; `default` is the rule on `api_key` alone.
    #[cfg_attr(feature = "openapi", schema(min_length = 1, max_length = 512))]
    descriptor: String,
    /// Units allowed per period; 0 blocks all. Required unless `limit` is `unlimited`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    requests_per_unit: Option<u64>,
    /// The period: `minute`, or any other such as `30s`. Required unless `limit` is `unlimited`.
    #[serde(alias = "period", default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(min_length = 1, max_length = 64))]
    unit: Option<String>,
    /// Maximum number of units at one instant.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    burst: Option<u64>,
    /// `unlimited`, instead of a number: no rate of the rule limits the caller.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    limit: Option<WrittenLimit>,
    /// `all`: the override replaces all limits of the rule, not only the one with the same period.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    replace: Option<WrittenReplace>,
}

#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
enum WrittenLimit {
    Unlimited,
}

#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
enum WrittenReplace {
    SamePeriod,
    All,
}

impl TryFrom<WrittenOverride> for QuotaOverride {
    type Error = &'static str;

    fn try_from(written: WrittenOverride) -> Result<Self, &'static str> {
        let WrittenOverride { descriptor, requests_per_unit, unit, burst, limit, replace } = written;
        let limit = match (limit, requests_per_unit, unit) {
            (Some(WrittenLimit::Unlimited), None, None) if burst.is_none() => None,
            (Some(WrittenLimit::Unlimited), ..) => {
                return Err(
                    "`limit: unlimited` beside `requests_per_unit`, `unit` or `burst`; keep one of them",
                );
            }
            (None, Some(count), Some(period)) => Some(OverrideRate { count, period, burst }),
            (None, None, _) => {
                return Err("missing field `requests_per_unit` (or write `limit: \"unlimited\"`)");
            }
            (None, Some(_), None) => return Err("missing field `unit`"),
        };
        let replaces = match replace {
            Some(WrittenReplace::All) => Replaces::All,
            Some(WrittenReplace::SamePeriod) | None => Replaces::SamePeriod,
        };
        Ok(Self(Override { descriptor, limit, replaces }))
    }
}

impl From<QuotaOverride> for WrittenOverride {
    fn from(QuotaOverride(Override { descriptor, limit, replaces }): QuotaOverride) -> Self {
        let written = Self {
            descriptor,
            requests_per_unit: None,
            unit: None,
            burst: None,
            limit: None,
            replace: (replaces == Replaces::All).then_some(WrittenReplace::All),
        };
        match limit {
            None => Self { limit: Some(WrittenLimit::Unlimited), ..written },
            Some(OverrideRate { count, period, burst }) => {
                Self { requests_per_unit: Some(count), unit: Some(period), burst, ..written }
            }
        }
    }
}

#[cfg(feature = "openapi")]
impl utoipa::PartialSchema for QuotaOverride {
    fn schema() -> utoipa::openapi::RefOr<utoipa::openapi::Schema> {
        WrittenOverride::schema()
    }
}

#[cfg(feature = "openapi")]
impl utoipa::ToSchema for QuotaOverride {
    fn name() -> std::borrow::Cow<'static, str> {
        WrittenOverride::name()
    }

    fn schemas(schemas: &mut Vec<(String, utoipa::openapi::RefOr<utoipa::openapi::Schema>)>) {
        WrittenOverride::schemas(schemas);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Nodes of other versions read what is stored, and compare digests of it.
    #[test]
    fn what_older_versions_wrote_is_written_alike() {
        for text in [
            r#"{"descriptor":"default","requests_per_unit":5,"unit":"minute"}"#,
            r#"{"descriptor":"default","requests_per_unit":5,"unit":"minute","burst":2}"#,
            r#"{"descriptor":"default","requests_per_unit":5,"unit":"minute","replace":"all"}"#,
            r#"{"descriptor":"default","limit":"unlimited"}"#,
        ] {
            let own: QuotaOverride = serde_json::from_str(text).expect(text);
            assert_eq!(serde_json::to_string(&own).expect("JSON"), text);
        }
        for (text, says) in [
            (r#"{"descriptor":"d"}"#, "missing field `requests_per_unit`"),
            (r#"{"descriptor":"d","requests_per_unit":5}"#, "missing field `unit`"),
            (r#"{"descriptor":"d","requests_per_unit":5,"unit":"s","limit":"unlimited"}"#, "keep one"),
            (r#"{"descriptor":"d","limit":"none"}"#, "unknown variant"),
        ] {
            let error = serde_json::from_str::<QuotaOverride>(text).expect_err(text);
            assert!(error.to_string().contains(says), "{error}");
        }
    }
}
