//! The course of one case: the same requests at the same times to a door and to an engine of its own, and what is compared after
//! each. The door's own answers decide when the next request is sent: where it names a time, one unit before it, and at it.

use crate::doors::{Door, Form, Open};
use crate::facts::{self, Abilities, Facts};
use crate::features::{Case, DOMAIN, KEY, Store};
use crate::world::{World, control_plane};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fmt;
use tollgate_core::{Clock, Cost, TimeDelta};
use tollgate_engine::{Check, Decision};
use tollgate_rules::Descriptor;

/// Requests of a case, without those that try a time.
const REQUESTS: u32 = 7;
/// Requests that come before any unit is restored.
const BURST: u64 = 4;
/// The longest wait that is tried.
const LONGEST: u64 = 40 * 86_400;

/// What was compared.
#[derive(Clone, Debug, Default)]
pub(crate) struct Tally {
    pub(crate) requests: u64,
    pub(crate) facts: u64,
    pub(crate) times: u64,
    pub(crate) skipped: BTreeMap<String, u64>,
}

impl Tally {
    pub(crate) fn add(&mut self, other: &Self) {
        self.requests += other.requests;
        self.facts += other.facts;
        self.times += other.times;
        other
            .skipped
            .iter()
            .for_each(|(reason, count)| *self.skipped.entry(reason.clone()).or_default() += count);
    }
}

/// A fact that a door says otherwise.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Failure {
    pub(crate) features: Vec<&'static str>,
    pub(crate) case: String,
    pub(crate) door: String,
    pub(crate) fact: &'static str,
    pub(crate) said: String,
    pub(crate) expected: String,
    request: u64,
    after_ms: u64,
    rules: String,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { case, door, fact, said, expected, request, after_ms, rules, .. } = self;
        write!(
            f,
            "[{case}] by {door}, request {request} after {after_ms} ms: {fact} is\n    {said}\n  and should be\n    {expected}\n  \
             by the rules\n    {rules}\n  (TOLLGATE_MATRIX_ONLY='{case}' runs this case alone)"
        )
    }
}

/// Runs a case through doors.
pub(crate) async fn case(case: &Case, doors: &[Door], able: &Abilities) -> (Tally, Vec<Failure>) {
    let (mut tally, mut failures) = (Tally::default(), Vec::new());
    let control = match control_plane(case).await {
        Ok(control) => control,
        Err(reason) => {
            tally.skipped.insert(reason, 1);
            return (tally, failures);
        }
    };
    for door in doors {
        if let Some(reason) = facts::skip(case, *door) {
            *tally.skipped.entry(reason.to_owned()).or_default() += 1;
            continue;
        }
        let match_all = door.form() == Form::All;
        let world = World::new(case, match_all, control.as_ref());
        let reference = World::new(case, match_all, control.as_ref());
        let open = Open::new(*door, case, &world).await;
        let mut run = Run { case, door: *door, able, world, reference, open, tally, failures, sent: 0 };
        run.course().await;
        (tally, failures) = (run.tally, run.failures);
    }
    (tally, failures)
}

struct Run<'c> {
    case: &'c Case,
    door: Door,
    able: &'c Abilities,
    world: World,
    /// The same limiter without a door.
    reference: World,
    open: Open,
    tally: Tally,
    failures: Vec<Failure>,
    sent: u64,
}

impl Run<'_> {
    async fn course(&mut self) {
        for _ in 0..REQUESTS {
            let (facts, decision) = self.request().await;
            let number = |fact: &str| facts.get(fact).and_then(|text| text.parse::<u64>().ok());
            let second = TimeDelta::from_secs(1);
            let is_denied = facts["verdict"] == "deny";
            let (until, unit) = match number("retry_after_ms").filter(|_| is_denied) {
                Some(wait) => (Some(TimeDelta::from_millis(wait)), TimeDelta::from_millis(1)),
                None if is_denied => (number("retry_after").map(TimeDelta::from_secs), second),
                None => {
                    // That is the time of the next unit, which is not enough for a request of two.
                    let is_used_up = facts.get("rate").is_some_and(|rate| rate.ends_with(" 0"))
                        && !self.case.has("cost")
                        && !self.case.has("cost of an attribute");
                    (number("t").filter(|_| is_used_up).map(TimeDelta::from_secs), second)
                }
            };
            // A time that is named while the store is away does not outlast that.
            let is_lasting = self.case.store != Store::Away && !self.case.has("split");
            // Measures and grants of a case end.
            let longest = if self.case.control.is_empty() { LONGEST } else { 1_800 };
            let is_tried =
                |until: &TimeDelta| is_lasting && until.ceil_secs() <= longest && *until > TimeDelta::ZERO;
            match until.filter(is_tried) {
                Some(until) => self.try_time(until, unit, &facts, &decision).await,
                None => self.advance(TimeDelta::from_millis(137)),
            }
        }
        if self.door != Door::Throttle && !self.case.has("split") {
            self.metrics();
        }
    }

    fn advance(&self, by: TimeDelta) {
        self.world.clock.advance(by);
        self.reference.clock.advance(by);
    }

    /// Sends a request one unit before a time that was named, which must not pass, and one at that time, which must.
    async fn try_time(&mut self, until: TimeDelta, unit: TimeDelta, facts: &Facts, decision: &Decision) {
        self.tally.times += 1;
        let named = facts.get("rate").and_then(|rate| rate.split(' ').next()).map(str::to_owned);
        let before = TimeDelta::from_micros(until.as_micros() - unit.as_micros().min(until.as_micros()));
        if before > TimeDelta::ZERO {
            self.advance(before);
            let (_, early) = self.request().await;
            // Some let a request pass that a limit denies.
            let is_excepted = ["grant", "shadow_all", "exempt"].iter().any(|name| self.case.has(name));
            if early.is_allowed() && is_excepted {
                return;
            }
            if early.is_allowed() {
                self.fail("time", "a request passed one unit before it".to_owned(), until_text(until, unit));
                return;
            }
            self.advance(unit);
        } else {
            self.advance(until);
        }
        let (_, late) = self.request().await;
        // A named time is that of its own limit; another may deny then.
        let by = late.denied_by_name().map(str::to_owned);
        let is_other = decision.emergency().is_some() || decision.is_allowed() && by != named;
        if !late.is_allowed() && !is_other {
            self.fail(
                "time",
                format!("a request was denied at it by {}", by.unwrap_or_default()),
                until_text(until, unit),
            );
        }
    }

    /// Sends one request to both, and compares all facts of it.
    async fn request(&mut self) -> (Facts, Decision) {
        self.sent += 1;
        self.tally.requests += 1;
        self.world.set_away((3..=6).contains(&self.sent));
        self.reference.set_away((3..=6).contains(&self.sent));
        let explained = self.explain().await;
        let said = self.open.ask().await;
        let decision = self.decide().await;
        let expected = facts::of_decision(&decision, self.door.form());
        // Which shard of a split counter is charged depends on what else the thread has decided: only the limit is exact.
        if self.case.has("split") {
            if self.sent <= BURST {
                self.expect("verdict", said["verdict"].clone(), expected["verdict"].clone());
            }
            return (said, decision);
        }
        let (compared, differ) = facts::compare(self.able, self.door, &said, &expected);
        self.tally.facts += compared;
        for (fact, said, expected) in differ {
            self.fail(fact, said, expected);
        }
        if self.door == Door::Throttle {
            return (said, decision);
        }
        if let Some((status, explained)) = explained {
            self.compare_explanation(status, &explained, &expected);
        }
        self.compare_log(&said, &expected, &decision);
        self.compare_usage(&decision).await;
        (said, decision)
    }

    /// Decides the request by the engine alone.
    async fn decide(&self) -> Decision {
        let descriptors: Vec<Descriptor<'_>> = match self.door.form() {
            Form::All => vec![Descriptor { entries: &self.case.attributes, hits: None, limit: None }],
            _ => {
                let all = self.case.descriptors.iter();
                all.map(|entries| Descriptor { entries, hits: None, limit: None }).collect()
            }
        };
        let check = match self.door.form() {
            Form::Attributes => Check::attributes(DOMAIN, &self.case.attributes),
            Form::Each | Form::All => Check::descriptors(DOMAIN, &descriptors),
        };
        let limiter = &self.reference.limiter;
        let (decision, held) = limiter.admit(&check.with_cost(Cost::ONE)).await;
        if let Some(held) = held.filter(|_| self.door.releases()) {
            limiter.release(&held).await.expect("released");
        }
        decision
    }

    fn fail(&mut self, fact: &'static str, said: String, expected: String) {
        let names = Door::ALL.iter().find(|(door, _)| *door == self.door);
        self.failures.push(Failure {
            features: self.case.features.iter().map(|one| one.name).collect(),
            case: self.case.name.clone(),
            door: names.map_or("", |(_, name)| name).to_owned(),
            fact,
            said,
            expected,
            request: self.sent,
            after_ms: self.reference.clock.now().since(crate::world::START).ceil_millis(),
            rules: self.case.rules(self.door.form() == Form::All),
        });
    }

    fn expect(&mut self, fact: &'static str, said: String, expected: String) {
        self.tally.facts += 1;
        if said != expected {
            self.fail(fact, said, expected);
        }
    }

    /// Explains the request before it is sent. Nothing is explained while the store is away.
    async fn explain(&self) -> Option<(u16, Value)> {
        let pairs = |pairs: &[(&str, &str)]| json!({"entries": pairs.iter().map(|(key, value)| json!([key, value])).collect::<Vec<_>>()});
        let mut body = json!({"domain": DOMAIN});
        match self.door.form() {
            Form::Attributes => {
                let all = self.case.attributes.iter().map(|(key, value)| ((*key).to_owned(), json!(value)));
                body["attributes"] = Value::Object(all.collect());
            }
            Form::Each => body["descriptors"] = self.case.descriptors.iter().map(|one| pairs(one)).collect(),
            Form::All => body["descriptors"] = json!([pairs(&self.case.attributes)]),
        }
        let (status, body) = self.world.admin("POST", "/admin/v1/explain", &body.to_string()).await;
        (status != 503).then_some((status, body))
    }

    fn compare_explanation(&mut self, status: u16, explained: &Value, expected: &Facts) {
        self.expect("explain: status", status.to_string(), "200".to_owned());
        let outcome = &explained["outcome"];
        let is_denied = outcome["verdict"] == "deny";
        let verdict = if is_denied { "deny" } else { "allow" };
        self.expect("explain: verdict", verdict.to_owned(), expected["body.verdict"].clone());
        if is_denied {
            self.expect("explain: rule", text(&outcome["rule"]), expected["denied_by"].clone());
            self.expect(
                "explain: wait",
                text(&outcome["retry_after_ms"]),
                expected["retry_after_ms"].clone(),
            );
        }
        self.expect("explain: delay", text(&outcome["delay_ms"]), expected["delay_ms"].clone());
        self.expect("explain: warned_by", text(&outcome["warned_by"]), expected["warned_by"].clone());
        self.expect("explain: origin", text(&outcome["origin"]), expected["origin"].clone());
    }

    /// Compares the last record of the decision log, as `why` shows it.
    fn compare_log(&mut self, said: &Facts, expected: &Facts, decision: &Decision) {
        let telemetry = &self.world.status.telemetry;
        telemetry.drain_buffers();
        let query = tollgate_observe::DecisionQuery { limit: 1, ..Default::default() };
        let Some(record) = telemetry.search(&query).0.pop() else {
            return self.fail("log", "no record".to_owned(), "a record of each decision".to_owned());
        };
        let record = record.json(telemetry.node_info());
        let is_denied = record["verdict"] == "deny";
        let verdict = if is_denied { "deny" } else { "allow" };
        self.expect("log: verdict", verdict.to_owned(), expected["body.verdict"].clone());
        self.expect("log: origin", text(&record["origin"]), expected["origin"].clone());
        if is_denied {
            if let Some(id) = said.get("decision_id").filter(|id| *id != "-") {
                self.expect("log: id", text(&record["id"]), id.clone());
            }
            let by = if expected["denied_by"].starts_with("emergency:") { "emergency" } else { "rule" };
            self.expect("log: rule", text(&record[by]), expected["denied_by"].clone());
            self.expect("log: wait", text(&record["retry_after_ms"]), expected["retry_after_ms"].clone());
            if let Some(status) = decision.denying_limit().filter(|one| one.outcome.verdict.is_denied()) {
                let limit = decision.limit(status).map(|limit| limit.limit.clone()).expect("a limit");
                self.expect("log: limit", text(&record["limit"]["limit"]), limit.rate().count.to_string());
                let left = status.outcome.remaining;
                let used = limit.capacity().saturating_sub(left).to_string();
                self.expect("log: remaining", text(&record["remaining"]), left.to_string());
                self.expect("log: used", text(&record["used_before"]), used);
            }
        }
    }

    /// Compares usage, as the dashboard shows it, with the limits of the decision.
    async fn compare_usage(&mut self, decision: &Decision) {
        let others = self.case.attributes.iter().filter(|(name, _)| *name != "api_key");
        let query: Vec<String> = others
            .map(|(name, value)| format!("attr.{name}={}", value.replace(' ', "%20").replace('/', "%2F")))
            .collect();
        let path = format!("/admin/v1/usage/{KEY}?{}", query.join("&"));
        let (status, usage) = self.world.admin("GET", &path, "").await;
        if status != 200
            || decision.emergency().is_some()
            || self.door.releases() && self.case.has("concurrency")
        {
            return;
        }
        for limit in usage["limits"].as_array().cloned().unwrap_or_default() {
            let role = limit["role"].as_str().unwrap_or("live");
            let own = decision.shown_limits().filter(|one| {
                let facts = decision.limit(one).map(|limit| &limit.limit);
                let own = match one.role {
                    tollgate_rules::Role::Live => "live",
                    tollgate_rules::Role::Shadow => "shadow",
                    tollgate_rules::Role::Candidate => "candidate",
                    tollgate_rules::Role::Quota => "quota",
                    tollgate_rules::Role::Unenforced => "unenforced",
                };
                facts.is_some_and(|facts| {
                    decision.limit_name(one) == limit["rule"]
                        && own == role
                        && tollgate_engine::Window::from_limit(facts).to_string() == limit["window"]
                        && facts.rate().count == limit["count"]
                        && one.outcome.verdict != tollgate_core::Verdict::Unknown
                        && !decision.is_granted(one)
                })
            });
            let own: Vec<String> = own
                .map(|one| {
                    let capacity = decision.limit(one).map_or(0, |limit| limit.limit.capacity());
                    format!("{} of {capacity}", one.outcome.remaining)
                })
                .collect();
            if let Some(expected) = own.first() {
                let said = format!("{} of {}", limit["remaining"], limit["limit"]);
                self.expect("usage", said, expected.clone());
            }
        }
    }

    /// Compares the metrics of all requests with those of the engine alone.
    fn metrics(&mut self) {
        let counted = |world: &World| -> BTreeMap<String, u64> {
            let names =
                ["ratelimit_decisions_total", "ratelimit_rule_checks_total", "ratelimit_soft_limit_total"];
            let all = world.metrics().into_iter();
            all.filter(|(name, _)| names.iter().any(|wanted| name.starts_with(wanted))).collect()
        };
        let (said, expected) = (counted(&self.world), counted(&self.reference));
        self.expect("metrics", format!("{said:?}"), format!("{expected:?}"));
    }
}

fn until_text(until: TimeDelta, unit: TimeDelta) -> String {
    format!("{} ms, by units of {} ms", until.ceil_millis(), unit.ceil_millis())
}

fn text(value: &Value) -> String {
    match value {
        Value::Null => "-".to_owned(),
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}
