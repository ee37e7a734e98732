//! The environment of envoyproxy/ratelimit, read once: every variable is checked against its type, whether or not it has
//! an effect, and what has none is named.

use super::go_values;
use super::variables::{Effect, JITTER, Kind, NEEDS, VARIABLES, Variable, find};
use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

/// A variable whose value has the wrong type or no meaning.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct InvalidValue {
    pub(super) variable: String,
    pub(super) reason: String,
}

impl InvalidValue {
    pub(super) fn new(variable: &str, reason: impl Into<String>) -> Self {
        Self { variable: variable.to_owned(), reason: reason.into() }
    }
}

impl fmt::Display for InvalidValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.variable, self.reason)
    }
}

impl std::error::Error for InvalidValue {}

/// The variables that are set, each of its type.
#[derive(Debug, Default)]
pub(super) struct Environment {
    values: BTreeMap<&'static str, String>,
    /// What to report about values that are used as others.
    replaced: Vec<String>,
    /// Tollgate's own variable that says whose keys are used in Redis.
    shared_keys: Option<String>,
}

/// Name of the variable that says whose keys are used in Redis.
pub(super) const SHARED_KEYS: &str = "TOLLGATE_SHARED_KEYS";

/// How a variable without effect is reported.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Notice {
    Info(String),
    Warning(String),
}

impl Environment {
    /// Reads all variables.
    ///
    /// # Errors
    /// The first variable whose value has the wrong type.
    pub(super) fn read(lookup: impl Fn(&str) -> Option<String>) -> Result<Self, InvalidValue> {
        let (mut values, mut replaced) = (BTreeMap::new(), Vec::new());
        for variable in VARIABLES {
            let Some(mut text) = lookup(variable.name) else { continue };
            if let Some((usable, why)) = usable(variable, &text) {
                replaced.push(format!("{}: `{text}` {why}", variable.name));
                let Some(usable) = usable else { continue };
                text = usable;
            }
            let checked = match variable.kind {
                Kind::Text | Kind::List => Ok(()),
                Kind::Integer => go_values::integer(&text).map(drop),
                Kind::Float => go_values::float(&text).map(drop),
                Kind::Boolean => go_values::boolean(&text).map(drop),
                Kind::Duration => go_values::duration(&text).map(drop),
                Kind::Map => go_values::map(&text).map(drop),
            };
            checked.map_err(|reason| InvalidValue::new(variable.name, reason))?;
            values.insert(variable.name, text);
        }
        let shared_keys = lookup(SHARED_KEYS).filter(|text| !text.is_empty());
        Ok(Self { values, replaced, shared_keys })
    }

    /// Returns what to report about variables that are set and have no effect.
    pub(super) fn notices(&self) -> Vec<Notice> {
        let notice = |(name, value): (&&'static str, &String)| {
            let variable = find(name)?;
            match variable.effect {
                Effect::Honored => None,
                Effect::NotNeeded(why) => Some(Notice::Info(format!("{name} is not needed: {why}"))),
                Effect::Unsupported(_) if value == variable.default => None,
                Effect::Unsupported(_) if *name == JITTER && self.shared_keys.is_some() => None,
                Effect::Unsupported(why) => Some(Notice::Warning(format!("{name} has no effect: {why}"))),
            }
        };
        let idle = |(name, needed): &(&'static str, &'static str)| {
            let has_needed = match find(needed).map(|variable| variable.kind) {
                Some(Kind::Boolean) => self.flag(needed),
                _ => self.some_text(needed).is_some(),
            };
            let is_idle = self.some_text(name).is_some() && !has_needed;
            is_idle.then(|| Notice::Warning(format!("{name} has no effect without {needed}")))
        };
        let replaced = self.replaced.iter().cloned().map(Notice::Warning);
        replaced.chain(self.values.iter().filter_map(notice)).chain(NEEDS.iter().filter_map(idle)).collect()
    }

    /// Returns whose keys are used in Redis, if not Tollgate's.
    pub(super) fn shared_keys(&self) -> Option<&str> {
        self.shared_keys.as_deref()
    }

    /// Returns whether a variable is set.
    pub(super) fn is_set(&self, name: &str) -> bool {
        self.values.contains_key(name)
    }

    /// Returns the value of a variable, or its default.
    pub(super) fn text(&self, name: &'static str) -> &str {
        let default = || find(name).map_or("", |variable| variable.default);
        self.values.get(name).map_or_else(default, String::as_str)
    }

    /// Returns a text, or `None` if it is empty.
    pub(super) fn some_text(&self, name: &'static str) -> Option<String> {
        Some(self.text(name).to_owned()).filter(|text| !text.is_empty())
    }

    pub(super) fn flag(&self, name: &'static str) -> bool {
        go_values::boolean(self.text(name)).unwrap_or_default()
    }

    pub(super) fn duration(&self, name: &'static str) -> Duration {
        go_values::duration(self.text(name)).unwrap_or_default()
    }

    pub(super) fn float(&self, name: &'static str) -> f64 {
        go_values::float(self.text(name)).unwrap_or_default()
    }

    pub(super) fn map(&self, name: &'static str) -> Vec<(String, String)> {
        go_values::map(self.text(name)).unwrap_or_default()
    }

    /// Returns a whole number within the range of `T`.
    ///
    /// # Errors
    /// The number is outside that range.
    pub(super) fn number<T: TryFrom<i64>>(&self, name: &'static str) -> Result<T, InvalidValue> {
        let number = go_values::integer(self.text(name)).unwrap_or_default();
        T::try_from(number).map_err(|_| InvalidValue::new(name, format!("{number} is out of range")))
    }
}

/// Returns what to use in place of a value with which that service runs although it has no meaning, and why; nothing is
/// what a variable has that is not set.
fn usable(variable: &Variable, text: &str) -> Option<(Option<String>, String)> {
    match variable.name {
        "NEAR_LIMIT_RATIO" => {
            let ratio = go_values::float(text).ok().filter(|ratio| !(0.0..=1.0).contains(ratio))?;
            // There nothing is near a limit that is not a number, as with 1.
            let nearest = if ratio.is_nan() { 1.0 } else { ratio.clamp(0.0, 1.0) };
            Some((Some(nearest.to_string()), format!("is not between 0 and 1; it is used as {nearest}")))
        }
        "PROMETHEUS_ADDR" if !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit()) => {
            Some((Some(format!(":{text}")), format!("has no host; it is used as :{text}")))
        }
        // It ends that service too.
        "STATS_FLUSH_INTERVAL" => None,
        name if variable.kind == Kind::Duration => {
            let length = go_values::duration(text.strip_prefix('-')?).ok()?;
            let (used, what) = match name {
                _ if length.is_zero() => (Some("0"), "0"),
                "GRPC_MAX_CONNECTION_AGE" => (Some("0"), "0, which is no end"),
                "GRPC_MAX_CONNECTION_AGE_GRACE" => (Some("1ns"), "no grace"),
                _ => (None, "if it were not set"),
            };
            Some((used.map(str::to_owned), format!("is negative; it is used as {what}")))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn environment(values: &[(&str, &str)]) -> Result<Environment, InvalidValue> {
        Environment::read(|name| {
            values.iter().find(|(own, _)| *own == name).map(|(_, value)| (*value).to_owned())
        })
    }

    /// That service runs with them.
    #[test]
    fn values_out_of_range_are_replaced_and_reported() {
        for (name, value, used) in [
            ("NEAR_LIMIT_RATIO", "2", "1"),
            ("NEAR_LIMIT_RATIO", "-1", "0"),
            ("NEAR_LIMIT_RATIO", "0.5", "0.5"),
            ("NEAR_LIMIT_RATIO", "Inf", "1"),
            ("NEAR_LIMIT_RATIO", "-infinity", "0"),
            ("NEAR_LIMIT_RATIO", "NaN", "1"),
            ("NEAR_LIMIT_RATIO", "0x1p-2", "0x1p-2"),
            ("GRPC_MAX_CONNECTION_AGE", "-1s", "0"),
            ("GRPC_MAX_CONNECTION_AGE_GRACE", "-1s", "1ns"),
            ("REDIS_TIMEOUT", "-1s", "10s"),
            ("REDIS_TIMEOUT", "-0", "0"),
            ("REDIS_PIPELINE_WINDOW", "-1s", "0"),
            ("MEMCACHE_SRV_REFRESH", "-1m30s", "0"),
            ("CONFIG_GRPC_XDS_SERVER_CONNECT_RETRY_INTERVAL", "-1s", "3s"),
            ("PROMETHEUS_ADDR", "9091", ":9091"),
            ("PROMETHEUS_ADDR", "127.0.0.1:9091", "127.0.0.1:9091"),
        ] {
            let environment = environment(&[(name, value)]).expect("usable");
            assert_eq!(environment.text(find(name).expect("known").name), used, "{name}={value}");
            let is_reported = environment.notices().iter().any(
                |notice| matches!(notice, Notice::Warning(text) if text.starts_with(&format!("{name}: `{value}`"))),
            );
            assert_eq!(is_reported, value != used, "{name}={value}");
        }
        environment(&[("GRPC_MAX_CONNECTION_AGE", "-x")]).expect_err("not a duration");
        environment(&[("STATS_FLUSH_INTERVAL", "-1s")]).expect_err("it ends that service too");
    }

    /// Otherwise a default that does not parse would be zero without a word.
    #[test]
    fn every_default_has_its_type() {
        for variable in VARIABLES {
            let optional =
                variable.default.is_empty() && matches!(variable.kind, Kind::Text | Kind::List | Kind::Map);
            let read = environment(&[(variable.name, variable.default)]);
            assert!(optional || read.is_ok(), "{}: {read:?}", variable.name);
        }
    }

    #[test]
    fn a_wrong_type_names_its_variable() {
        for (name, value) in [
            ("PORT", "http"),
            ("PORT", ""),
            ("USE_STATSD", "yes"),
            ("REDIS_TIMEOUT", "10"),
            ("NEAR_LIMIT_RATIO", "most"),
            ("EXTRA_TAGS", "env=test"),
            ("REDIS_POOL_SIZE", "many"),
        ] {
            let error = environment(&[(name, value)]).expect_err(name).to_string();
            assert!(error.starts_with(&format!("{name}: ")), "{error}");
        }
    }

    #[test]
    fn what_has_no_effect_is_named() {
        let set = environment(&[
            ("REDIS_POOL_SIZE", "20"),
            ("REDIS_PIPELINE_LIMIT", "0"),
            ("GRPC_SERVER_TLS_CA_CERT", "/certs/ca.crt"),
            ("HOST", "::"),
        ]);
        let notices = set.expect("valid").notices();
        assert_eq!(notices.len(), 2, "{notices:?}");
        let jitter = ("EXPIRATION_JITTER_MAX_SECONDS", "10");
        assert_eq!(environment(&[jitter]).expect("valid").notices().len(), 1);
        let shared = environment(&[jitter, (SHARED_KEYS, "envoy")]).expect("valid");
        assert_eq!((shared.notices(), shared.shared_keys()), (vec![], Some("envoy")), "it counts");
        for (name, other) in [("LOCAL_CACHE_SIZE_IN_BYTES", "1000"), ("REDIS_STARTUP_MAX_INTERVAL", "5s")] {
            let default = find(name).expect("known").default;
            assert_eq!(environment(&[(name, default)]).expect("valid").notices(), []);
            let notices = environment(&[(name, other)]).expect("valid").notices();
            assert!(matches!(&notices[..], [Notice::Warning(text)] if text.starts_with(name)), "{notices:?}");
        }
        assert!(
            matches!(&notices[1], Notice::Warning(text) if text.starts_with("REDIS_POOL_SIZE has no effect"))
        );
        assert!(matches!(&notices[0], Notice::Info(text) if text.starts_with("GRPC_SERVER_TLS_CA_CERT")));
    }

    /// Operators who set these expect that unknown clients are rejected.
    #[test]
    fn what_has_no_effect_without_another_is_named() {
        let (ca, name) = (("GRPC_CLIENT_TLS_CACERT", "/ca"), ("GRPC_CLIENT_TLS_SAN", "x"));
        let tls = ("GRPC_SERVER_USE_TLS", "true");
        for (values, expected) in [
            (vec![tls, ca, name], vec![]),
            (vec![tls, name], vec!["GRPC_CLIENT_TLS_SAN has no effect without GRPC_CLIENT_TLS_CACERT"]),
            (
                vec![ca, name],
                vec![
                    "GRPC_CLIENT_TLS_CACERT has no effect without GRPC_SERVER_USE_TLS",
                    "GRPC_CLIENT_TLS_SAN has no effect without GRPC_SERVER_USE_TLS",
                ],
            ),
        ] {
            let notices = environment(&values).expect("valid").notices();
            let expected: Vec<_> =
                expected.into_iter().map(|text| Notice::Warning(text.to_owned())).collect();
            assert_eq!(notices, expected);
        }
    }
}
