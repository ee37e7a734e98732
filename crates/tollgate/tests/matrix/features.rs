//! The table of features. A feature is what it adds to a rule, to the rule file, to the request, to the control plane or to the
//! store; the rule file of a pair is put together from two of them, in one rule where the rule language allows that, and in two
//! rules beside each other.

use serde_json::{Map, Value, json};
use tollgate_rules::{Options, Ruleset, Source};

/// The caller's key, and what else every request carries.
pub(crate) const KEY: &str = "key-of-the-matrix";
pub(crate) const USER: &str = "ann";
pub(crate) const ADDRESS: &str = "198.51.100.7";
pub(crate) const ENDPOINT: &str = "GET /orders/{id}";
pub(crate) const DOMAIN: &str = "d";

/// What stands between the limiter and its counters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Store {
    /// Counters in memory.
    Memory,
    /// The same, behind leases and a deny cache, as Redis is.
    Leased,
    /// The same, which does not answer from the third request to the sixth.
    Away,
    /// The same, whose answers have to be awaited.
    Awaited,
}

/// One row of the table.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Feature {
    pub(crate) name: &'static str,
    /// Keys of the rule (YAML).
    rule: &'static str,
    /// Keys of the file.
    file: &'static str,
    /// The key that the rule counts by, in place of its own.
    key: Option<&'static str>,
    /// The parent that the rule stands under.
    under: Option<(&'static str, &'static str)>,
    /// Attributes that the request carries besides.
    with: &'static [(&'static str, &'static str)],
    /// The last entry of its descriptors, as Envoy sends a tier.
    entry: Option<(&'static str, &'static str)>,
    /// Another rule.
    beside: &'static str,
    /// Calls of the admin API before the first request; `RULE` is the rule's name, `KEY` and
    /// `VALUE` what it counts by.
    pub(crate) control: &'static [(&'static str, &'static str, &'static str)],
    pub(crate) store: Store,
}

const PLAIN: Feature = Feature {
    name: "",
    rule: "{}",
    file: "{}",
    key: None,
    under: None,
    with: &[],
    entry: None,
    beside: "",
    control: &[],
    store: Store::Memory,
};

const fn rule(name: &'static str, rule: &'static str) -> Feature {
    Feature { name, rule, ..PLAIN }
}

const fn file(name: &'static str, file: &'static str) -> Feature {
    Feature { name, file, ..PLAIN }
}

const fn control(
    name: &'static str,
    control: &'static [(&'static str, &'static str, &'static str)],
) -> Feature {
    Feature { name, control, ..PLAIN }
}

const QUOTA: &str = "/admin/v1/quotas/VALUE?key=KEY&confirm=true";
const EMERGENCY: &str = "/admin/v1/emergency";

/// All features. Add a row for each new one.
pub(crate) const FEATURES: &[Feature] = &[
    rule("gcra", "{algorithm: gcra}"),
    rule("token_bucket", "{algorithm: token_bucket}"),
    rule("leaky_bucket", "{algorithm: leaky_bucket}"),
    rule("fixed_window", "{algorithm: fixed_window}"),
    rule("sliding_window", "{algorithm: sliding_window}"),
    rule("strict_window", "{algorithm: strict_window}"),
    rule("sliding_log", "{algorithm: sliding_log}"),
    rule("concurrency", "{concurrency: {limit: 2, ttl: 40s}}"),
    rule("refill_interval", "{limit: {count: 3, period: minute, refill_interval: 20s}}"),
    rule("burst", "{limit: {count: 6, period: minute, burst: 2}}"),
    rule("calendar", "{limit: 3/day in Europe/Zurich}"),
    rule("windows", "{limit: [3/minute, 5/hour]}"),
    rule("unlimited", "{limit: null, rate_limit: {unlimited: true}}"),
    rule("zero", "{limit: 0/minute}"),
    Feature {
        with: &[("tier", "pro")],
        entry: Some(("tier", "pro")),
        ..rule("tier of the request", "{tiers: {pro: 2/minute, free: 1/minute}}")
    },
    Feature {
        control: &[("PUT", QUOTA, r#"{"tier": "pro", "reason": "plan"}"#)],
        ..rule("tier of a quota", "{tiers: {pro: 2/minute, free: 1/minute}}")
    },
    control(
        "override",
        &[(
            "PUT",
            QUOTA,
            r#"{"overrides": [{"descriptor": "RULE", "requests_per_unit": 2, "unit": "minute"}], "reason": "deal"}"#,
        )],
    ),
    control(
        "grant",
        &[(
            "POST",
            "/admin/v1/usage/VALUE/grant?key=KEY",
            r#"{"rule": "RULE", "units": 2, "reason": "gift", "ttl_seconds": 86400}"#,
        )],
    ),
    rule("candidate", "{candidate: 1/minute}"),
    rule("shadow", "{shadow: true}"),
    rule("enforce", "{enforce: 0.1%}"),
    rule("soft", "{soft: 50%}"),
    rule("soft degrade", "{soft: {at: 50%, action: degrade}}"),
    rule("degrade", "{action: degrade}"),
    rule("split", "{split: 2}"),
    rule("cost", "{cost: 2}"),
    Feature {
        with: &[("tokens", "2")],
        ..rule("cost of an attribute", "{limit: [3/minute, {count: 4, period: minute, cost: tokens}]}")
    },
    Feature {
        beside: "{key: global, name: replaced, limit: 1/minute}",
        ..rule("replaces", "{replaces: [{name: replaced}]}")
    },
    Feature { key: Some("remote_address/24"), ..rule("network key", "{}") },
    Feature { under: Some(("endpoint", ENDPOINT)), ..rule("endpoint template", "{}") },
    rule("quota_mode", "{quota_mode: true}"),
    rule("priority", "{priority: 10}"),
    rule("class security", "{class: security}"),
    rule("region split", "{region: split}"),
    rule("region owner", "{region: {mode: owner, owner: eu}}"),
    rule("region leased", "{region: leased}"),
    rule("durable", "{durable: true}"),
    rule("billing", "{billing: true}"),
    rule("local", "{mode: local}"),
    control("tighten", &[("POST", EMERGENCY, r#"{"action": "tighten", "factor": 0.5, "reason": "load"}"#)]),
    control(
        "block",
        &[(
            "POST",
            EMERGENCY,
            r#"{"action": "block", "target": {"kind": "api_key", "value": "key-of-the-matrix"}, "reason": "abuse", "ttl_seconds": 90}"#,
        )],
    ),
    control(
        "exempt",
        &[(
            "POST",
            EMERGENCY,
            r#"{"action": "exempt", "target": {"kind": "address", "value": "198.51.100.7"}, "reason": "test", "ttl_seconds": 600}"#,
        )],
    ),
    control("shadow_all", &[("POST", EMERGENCY, r#"{"action": "shadow_all", "reason": "test"}"#)]),
    file("fleet", "{overload: {fleet: {capacity: 4/minute}}}"),
    file("adapted", "{overload: {adapt: {signals: {queue: 100}, order: [free, pro], least: 50%, step: 1s}}}"),
    Feature { store: Store::Leased, ..rule("lease", "{mode: leased}") },
    Feature { store: Store::Leased, ..rule("deny cache", "{}") },
    Feature { store: Store::Away, ..rule("fallback", "{on_error: local}") },
    Feature { store: Store::Away, ..rule("fails closed", "{on_error: closed}") },
    Feature { store: Store::Away, ..rule("fails open", "{on_error: open}") },
    Feature { store: Store::Awaited, ..rule("late store", "{}") },
];

/// How two features meet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Meeting {
    /// In one rule.
    Together,
    /// In two rules that both match, the second of which counts by another key.
    Beside,
}

/// A rule file with what belongs to it.
#[derive(Clone, Debug)]
pub(crate) struct Case {
    pub(crate) name: String,
    pub(crate) features: Vec<Feature>,
    /// The rule file, in JSON, without `match`.
    file: Map<String, Value>,
    /// The attributes of each request.
    pub(crate) attributes: Vec<(&'static str, &'static str)>,
    /// The descriptors of each request, one for each rule.
    pub(crate) descriptors: Vec<Vec<(&'static str, &'static str)>>,
    /// Calls of the admin API.
    pub(crate) control: Vec<(&'static str, String, String)>,
    pub(crate) store: Store,
}

/// One of the rules of a case: its name, key and limit.
const RULES: [(&str, &str, &str, &str); 2] =
    [("first", "api_key", KEY, "3/minute"), ("second", "user", USER, "4/minute")];

impl Case {
    /// Puts the features together; the error is why they cannot be.
    pub(crate) fn new(features: &[Feature], meeting: Meeting) -> Result<Self, String> {
        let mut file = Map::from_iter([("domain".to_owned(), json!(DOMAIN))]);
        let mut case = Self {
            name: features.iter().map(|one| one.name).collect::<Vec<_>>().join(match meeting {
                Meeting::Together => " + ",
                Meeting::Beside => " | ",
            }),
            features: features.to_vec(),
            file: Map::new(),
            attributes: vec![
                ("api_key", KEY),
                ("user", USER),
                ("endpoint", ENDPOINT),
                ("remote_address", ADDRESS),
            ],
            descriptors: Vec::new(),
            control: Vec::new(),
            store: Store::Memory,
        };
        let mut rules = Vec::new();
        let groups: Vec<&[Feature]> = match meeting {
            Meeting::Together => vec![features],
            Meeting::Beside => features.chunks(1).collect(),
        };
        for (group, (name, key, value, limit)) in groups.into_iter().zip(RULES) {
            let (mut rule, mut path) = (Map::new(), vec![(key, value)]);
            let (mut under, mut entry) = (None, None);
            for feature in group {
                merge(&mut rule, feature.rule)?;
                if let Some(key) = feature.key {
                    path = vec![("remote_address", ADDRESS)];
                    rule.insert("key".to_owned(), json!(key));
                }
                under = feature.under.or(under);
                entry = feature.entry.or(entry);
            }
            rule.entry("limit").or_insert(json!(limit));
            rule.retain(|_, value| !value.is_null());
            rule.entry("key").or_insert(json!(key));
            rule.insert("name".to_owned(), json!(name));
            let mut rule = Value::Object(rule);
            if let Some((key, value)) = under {
                path.insert(0, (key, value));
                rule = json!({"key": key, "value": value, "descriptors": [rule]});
            }
            path.extend(entry);
            rules.push(rule);
            case.descriptors.push(path);
            for (method, target, body) in group.iter().flat_map(|feature| feature.control) {
                let target = target.replace("VALUE", value).replace("KEY", key);
                case.control.push((method, target, body.replace("RULE", name)));
            }
        }
        for feature in features {
            merge(&mut file, feature.file)?;
            case.attributes
                .extend(feature.with.iter().filter(|one| !case.attributes.contains(one)).collect::<Vec<_>>());
            if !feature.beside.is_empty() {
                rules.push(yaml(feature.beside));
                case.descriptors.push(vec![("global", "aggregate")]);
            }
            case.store = match (case.store, feature.store) {
                (one, Store::Memory) => one,
                (Store::Memory, other) => other,
                (one, other) if one == other => one,
                _ => return Err("two kinds of stores".to_owned()),
            };
        }
        // Two rules under one parent are one node of the tree.
        if let [Value::Object(one), Value::Object(other), ..] = &mut rules[..]
            && (one.get("value"), one.get("key")) == (other.get("value"), other.get("key"))
            && one.get("value").is_some()
        {
            let more =
                other.remove("descriptors").and_then(|all| all.as_array().cloned()).unwrap_or_default();
            one["descriptors"].as_array_mut().expect("a list").extend(more);
            rules.remove(1);
        }
        file.insert("descriptors".to_owned(), json!(rules));
        case.file = file;
        let errors = |errors: tollgate_rules::Diagnostics| {
            errors.all().first().map(|first| first.message.clone()).unwrap_or_default()
        };
        Ruleset::load(&[Source::new("rules", case.rules(false))], &Options::default()).map_err(errors)?;
        Ok(case)
    }

    /// Returns the rule file.
    pub(crate) fn rules(&self, match_all: bool) -> String {
        let mut file = self.file.clone();
        if match_all {
            file.insert("match".to_owned(), json!("all"));
        }
        Value::Object(file).to_string()
    }

    /// Returns whether one of the features has this name.
    pub(crate) fn has(&self, name: &str) -> bool {
        self.features.iter().any(|feature| feature.name == name)
    }
}

/// Adds keys, unless they are there with another value.
fn merge(into: &mut Map<String, Value>, text: &str) -> Result<(), String> {
    for (key, value) in yaml(text).as_object().expect("a map") {
        match (into.get_mut(key), value) {
            (None, value) => _ = into.insert(key.clone(), value.clone()),
            (Some(Value::Object(known)), Value::Object(more)) if key == "overload" => {
                known.extend(more.clone());
            }
            (Some(known), value) if known == value => {}
            _ => return Err(format!("two values of `{key}`")),
        }
    }
    Ok(())
}

fn yaml(text: &str) -> Value {
    serde_saphyr::from_str(text).unwrap_or_else(|error| panic!("{text}: {error}"))
}
