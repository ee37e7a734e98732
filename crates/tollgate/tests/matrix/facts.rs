//! What an answer says, as facts by name; the same facts of a decision of the engine, as simply as they can be computed; and the
//! table in the documentation, which says what each door can say.

use crate::doors::{Door, Form, status_list};
use crate::features::Case;
use std::collections::BTreeMap;
use tollgate_core::{TimeDelta, Verdict};
use tollgate_engine::{Decision, LimitStatus, Origin, Window};
use tollgate_rules::{Action, Role};

/// Facts by name. `-` is that there is none; what is not compared is absent, or `?`.
pub(crate) type Facts = BTreeMap<&'static str, String>;

pub(crate) fn put(facts: &mut Facts, name: &'static str, value: String) {
    facts.insert(name, value);
}

fn or_none(value: Option<impl ToString>) -> String {
    value.map_or("-".to_owned(), |value| value.to_string())
}

/// Reads a status and the fields of a response.
pub(crate) fn from_fields(facts: &mut Facts, status: u16, fields: &[(String, String)]) {
    let field = |wanted: &str| {
        let found = fields.iter().find(|(name, _)| name.eq_ignore_ascii_case(wanted));
        found.map(|(_, value)| value.as_str())
    };
    let verdict = match status {
        200 => "allow".to_owned(),
        429 => "deny".to_owned(),
        503 => "unavailable".to_owned(),
        other => format!("status {other}"),
    };
    put(facts, "verdict", verdict);
    for (fact, name) in [
        ("denied_by", "x-ratelimit-denied-by"),
        ("retry_after", "retry-after"),
        ("degraded_by", "x-ratelimit-degraded"),
        ("warned_by", "x-ratelimit-warning"),
        ("decision_id", "x-ratelimit-decision-id"),
        ("reset_epoch", "x-ratelimit-reset"),
    ] {
        put(facts, fact, or_none(field(name)));
    }
    let legacy = field("x-ratelimit-remaining").zip(field("x-ratelimit-limit"));
    put(facts, "legacy", or_none(legacy.map(|(remaining, limit)| format!("{remaining} of {limit}"))));
    let permits = field("x-ratelimit-concurrency-remaining").zip(field("x-ratelimit-concurrency-limit"));
    put(facts, "permits", or_none(permits.map(|(remaining, limit)| format!("{remaining} of {limit}"))));
    let (mut rate, mut t) = ("-".to_owned(), "-".to_owned());
    // The rate comes first; permits have no time, and stand alone where no rate is limited.
    let first = field("ratelimit").and_then(|text| text.split(", ").next()).filter(|_| legacy.is_some());
    if let Some((name, parameters)) = first.and_then(|item| item.split_once(';')) {
        let parameter =
            |name: &str| parameters.split(';').find_map(|one| one.strip_prefix(name)?.strip_prefix('='));
        rate = format!("{} {}", base(name), parameter("r").unwrap_or("?"));
        t = or_none(parameter("t"));
    }
    put(facts, "rate", rate);
    put(facts, "t", t);
    let mut policies: Vec<String> = field("ratelimit-policy")
        .into_iter()
        .flat_map(|text| text.split(", "))
        .map(|item| {
            let (name, parameters) = item.split_once(';').unwrap_or((item, ""));
            format!("{};{parameters}", base(name))
        })
        .collect();
    policies.sort();
    put(facts, "policies", if policies.is_empty() { "-".to_owned() } else { policies.join(", ") });
}

/// Returns the name of a rule without its window, which it has where the rule has several.
fn base(name: &str) -> &str {
    let name = name.trim_matches('"');
    name.split_once('/').map_or(name, |(rule, _)| if rule == "overload" { name } else { rule })
}

/// Returns the limits that can deny a request and were read: those that an answer may report.
fn deniers(decision: &Decision) -> impl Iterator<Item = &LimitStatus> {
    decision.shown_limits().filter(|status| can_deny(decision, status) && is_read(status))
}

fn is_read(status: &LimitStatus) -> bool {
    status.outcome.verdict != Verdict::Unknown
}

fn can_deny(decision: &Decision, status: &LimitStatus) -> bool {
    let rule = status.rule.and_then(|id| decision.rules().rule(id));
    status.role.is_live() && rule.is_none_or(|rule| rule.action != Action::Degrade)
}

fn is_permit(decision: &Decision, status: &LimitStatus) -> bool {
    decision.limit(status).is_some_and(|limit| Window::from_limit(&limit.limit) == Window::Concurrent)
}

/// Of several limits, the one that denies and lasts longest, else the one with the fewest units left.
fn nearest<'d>(decision: &Decision, all: impl Iterator<Item = &'d LimitStatus>) -> Option<&'d LimitStatus> {
    let count = |one: &LimitStatus| decision.limit(one).map_or(0, |limit| limit.limit.rate().count);
    all.min_by_key(|one| {
        let (left, lasts) = match one.outcome.verdict {
            Verdict::Denied { retry_after } => (0, retry_after.map_or(u64::MAX, TimeDelta::ceil_secs)),
            _ => (one.outcome.remaining.min(count(one)), one.outcome.reset_after.ceil_secs()),
        };
        (!one.outcome.verdict.is_denied(), left, std::cmp::Reverse(lasts))
    })
}

/// Returns whether the nearest limit is not the only one without a unit: which of them has the next unit last is not computed here.
fn is_tied<'d>(decision: &Decision, all: impl Iterator<Item = &'d LimitStatus>) -> bool {
    let all: Vec<&LimitStatus> = all.collect();
    let denies = all.iter().any(|one| one.outcome.verdict.is_denied());
    !denies && all.iter().filter(|one| one.outcome.remaining == 0 || decision.is_granted(one)).count() > 1
}

/// Returns what every door says of this decision, as far as it can.
pub(crate) fn of_decision(decision: &Decision, form: Form) -> Facts {
    let mut facts = Facts::new();
    let is_denied = !decision.is_allowed();
    let verdict = match () {
        () if !is_denied => "allow",
        () if decision.origin == Origin::FailClosed || decision.is_shed() => "unavailable",
        () => "deny",
    };
    put(&mut facts, "verdict", verdict.to_owned());
    put(&mut facts, "body.verdict", if is_denied { "deny" } else { "allow" }.to_owned());
    let denied_by = or_none(decision.denied_by_name());
    put(&mut facts, "denied_by", denied_by.clone());
    put(&mut facts, "body.denied_by", denied_by);
    let wait = decision.retry_after();
    put(&mut facts, "retry_after", or_none(wait.map(|wait| wait.ceil_secs().max(1))));
    put(&mut facts, "body.retry_after", or_none(wait.map(|wait| wait.ceil_secs().max(1))));
    put(&mut facts, "retry_after_ms", or_none(wait.map(TimeDelta::ceil_millis)));
    put(&mut facts, "delay_ms", decision.delay().ceil_millis().to_string());
    put(&mut facts, "origin", decision.origin.name().to_owned());
    for (header, body, by) in [
        ("degraded_by", "body.degraded_by", decision.degraded_by),
        ("warned_by", "body.warned_by", decision.warned_by),
    ] {
        let name = or_none(by.map(|by| decision.name(by)));
        put(&mut facts, header, name.clone());
        put(&mut facts, body, name);
    }
    // Of a limit that was not read nothing is known; what is said in its place is compared between the doors alone.
    let is_read = decision.shown_limits().all(is_read)
        && decision.emergency().is_none()
        && !is_tied(decision, deniers(decision).filter(|one| !is_permit(decision, one)));
    let count = |one: &LimitStatus| decision.limit(one).map_or(0, |limit| limit.limit.rate().count);
    let left = |one: &LimitStatus| one.outcome.remaining.min(count(one));
    let unread = || "?".to_owned();
    let rate = nearest(decision, deniers(decision).filter(|one| !is_permit(decision, one)));
    put(
        &mut facts,
        "rate",
        match rate {
            _ if !is_read => unread(),
            rate => or_none(rate.map(|one| format!("{} {}", decision.limit_name(one), left(one)))),
        },
    );
    put(
        &mut facts,
        "legacy",
        match rate {
            _ if !is_read => unread(),
            rate => or_none(rate.map(|one| format!("{} of {}", left(one), count(one)))),
        },
    );
    // With no unit left, the time is that of the next unit, which the runner tries.
    put(
        &mut facts,
        "t",
        match rate {
            _ if !is_read => unread(),
            None => "-".to_owned(),
            Some(one) => match one.outcome.verdict {
                Verdict::Denied { retry_after } if one.outcome.remaining == 0 => {
                    or_none(retry_after.map(TimeDelta::ceil_secs))
                }
                _ if one.outcome.remaining == 0 => unread(),
                _ => one.outcome.reset_after.ceil_secs().to_string(),
            },
        },
    );
    let permits = nearest(decision, deniers(decision).filter(|one| is_permit(decision, one)));
    put(
        &mut facts,
        "permits",
        match permits {
            _ if !is_read => unread(),
            permits => or_none(permits.map(|one| format!("{} of {}", left(one), count(one)))),
        },
    );
    let denying = decision.denying_limit().filter(|_| is_denied);
    put(
        &mut facts,
        "nearest",
        match denying.or_else(|| nearest(decision, deniers(decision))) {
            _ if !is_read => unread(),
            // Shadow limits alone.
            None if decision.shown_limits().next().is_some() => unread(),
            one => or_none(one.map(|one| {
                let capacity = decision.limit(one).map_or(0, |limit| limit.limit.capacity());
                let (units, reset) = (one.outcome.remaining, one.outcome.reset_after.ceil_secs());
                format!("{} {units} of {capacity}, {reset} s", decision.limit_name(one))
            })),
        },
    );
    let units = |one: &LimitStatus| {
        let capacity = decision.limit(one).map_or(0, |limit| limit.limit.capacity());
        format!("{} of {capacity}, {} s", one.outcome.remaining, one.outcome.reset_after.ceil_secs())
    };
    put(&mut facts, "units", or_none(decision.limits.first().map(units)));
    let mut policies: Vec<String> = decision
        .shown_limits()
        .filter(|one| can_deny(decision, one))
        .filter_map(|one| {
            let (name, units) = (decision.limit_name(one), count(one));
            let window = match Window::from_limit(&decision.limit(one)?.limit) {
                Window::Concurrent => return Some(format!("{name};q={units};qu=\"concurrent-requests\"")),
                Window::Rolling(length) => Some(length.ceil_secs().max(1)),
                Window::Calendar(tollgate_core::CalendarUnit::Day) => Some(86_400),
                Window::Calendar(_) => None,
            };
            Some(format!("{name};q={units}{}", window.map_or(String::new(), |window| format!(";w={window}"))))
        })
        .collect();
    policies.sort();
    policies.dedup();
    put(
        &mut facts,
        "policies",
        match () {
            () if decision.emergency().is_some() => unread(),
            () if policies.is_empty() => "-".to_owned(),
            () => policies.join(", "),
        },
    );
    put(&mut facts, "limits", limits(decision));
    if form != Form::Attributes {
        put(&mut facts, "statuses", if is_read { statuses(decision) } else { unread() });
    }
    facts
}

fn limits(decision: &Decision) -> String {
    let limit = |one: &LimitStatus| {
        let count = decision.limit(one).map_or(0, |limit| limit.limit.rate().count);
        let role = match one.role {
            Role::Live if !can_deny(decision, one) => "degrade",
            Role::Live => "live",
            Role::Shadow => "shadow",
            Role::Candidate => "candidate",
            Role::Quota => "quota",
            Role::Unenforced => "unenforced",
        };
        let remaining = match one.outcome.verdict {
            Verdict::Unknown if decision.origin == Origin::FailClosed => 0,
            Verdict::Unknown => count,
            _ => one.outcome.remaining,
        };
        format!(
            "{} {remaining} of {count}, {} ms, {role}{}{}",
            decision.limit_name(one),
            one.outcome.reported_reset().ceil_millis(),
            if one.outcome.verdict.is_denied() { " over" } else { "" },
            if is_read(one) { "" } else { " unread" }
        )
    };
    decision.shown_limits().map(limit).collect::<Vec<_>>().join("; ")
}

/// Returns the statuses of the descriptors of RLS.
fn statuses(decision: &Decision) -> String {
    let status = |at: usize| {
        let own = || decision.limits.iter().filter(|one| usize::from(one.descriptor) == at);
        let live = own().filter(|one| can_deny(decision, one) && is_read(one));
        let Some(one) = nearest(decision, live) else {
            // Of limits that cannot deny, an answer may say something or nothing.
            return if own().next().is_some() { None } else { Some((false, None, 0, 0)) };
        };
        let limit = decision.limit(one).map(|limit| limit.limit.rate().count);
        let reset = match one.outcome.verdict {
            Verdict::Denied { retry_after: Some(wait) } => wait,
            _ => one.outcome.reported_reset(),
        };
        Some((one.outcome.verdict.is_denied(), limit, one.outcome.remaining, reset.ceil_secs()))
    };
    let all: Option<Vec<_>> = (0..decision.descriptors.len()).map(status).collect();
    all.map_or("?".to_owned(), |all| status_list(all.into_iter()))
}

/// The columns of the table in `docs/api/doors.md`, and the facts that each is about.
const COLUMNS: &[(&str, &[&str])] = &[
    ("rule", &["denied_by"]),
    ("wait", &["retry_after"]),
    ("`RateLimit`", &["rate", "t", "legacy", "permits", "policies"]),
    ("degraded", &["degraded_by"]),
    ("warned", &["warned_by"]),
    (
        "every limit",
        &["limits", "retry_after_ms", "body.warned_by", "body.degraded_by", "body.denied_by", "body.verdict"],
    ),
    ("delay", &["delay_ms"]),
    ("origin", &["origin"]),
    ("statuses", &["statuses"]),
    ("nearest", &["nearest"]),
    ("own limit", &["units"]),
];

/// What each door can say.
pub(crate) struct Abilities(BTreeMap<String, Vec<&'static str>>);

impl Abilities {
    /// Reads the table of the documentation.
    pub(crate) fn read() -> Self {
        let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/api/doors.md");
        let page = std::fs::read_to_string(page).expect("docs/api/doors.md");
        let cells = |line: &str| -> Vec<String> {
            line.trim_matches('|').split('|').map(|cell| cell.trim().to_owned()).collect()
        };
        let mut rows = page.lines().filter(|line| line.starts_with('|')).map(cells);
        let head = rows.next().expect("a table");
        let names: Vec<&str> = COLUMNS.iter().map(|(name, _)| *name).collect();
        assert_eq!(head[1..], names, "the columns of docs/api/doors.md");
        let able = rows.skip(1).map(|row| {
            let facts = COLUMNS.iter().zip(&row[1..]).filter(|(_, cell)| *cell == "yes");
            (row[0].clone(), facts.flat_map(|((_, facts), _)| (*facts).to_vec()).collect())
        });
        Self(able.collect())
    }

    /// Returns whether the door must say this fact.
    pub(crate) fn says(&self, door: Door, fact: &str) -> bool {
        let name = Door::ALL.iter().find(|(one, _)| *one == door).map_or("", |(_, name)| name);
        let all = self.0.get(name).unwrap_or_else(|| panic!("no row of `{name}` in docs/api/doors.md"));
        fact == "verdict" || all.contains(&fact)
    }
}

/// Compares what a door says with what is expected. Returns the number of facts compared, and those that differ.
pub(crate) fn compare(
    able: &Abilities,
    door: Door,
    said: &Facts,
    expected: &Facts,
) -> (u64, Vec<(&'static str, String, String)>) {
    let (mut compared, mut differ) = (0, Vec::new());
    for (fact, expected) in expected.iter().filter(|(_, expected)| *expected != "?") {
        let must = able.says(door, fact);
        match said.get(fact) {
            // What a door cannot say it may leave out, but never say otherwise.
            None if !must || expected == "-" => continue,
            Some(said) if !must && said == "-" => continue,
            Some(said) if said == expected => {}
            said => differ.push((*fact, said.cloned().unwrap_or("(nothing)".to_owned()), expected.clone())),
        }
        compared += 1;
    }
    (compared, differ)
}

/// Returns the reason why a case says nothing through a door.
pub(crate) fn skip(case: &Case, door: Door) -> Option<&'static str> {
    let by_descriptors = door.form() != Form::Attributes;
    match () {
        () if by_descriptors && case.has("cost of an attribute") => {
            Some("RLS sends costs as hits, not as attributes")
        }
        () if door == Door::Throttle && (case.features.len() > 1 || !case.has("gcra")) => {
            Some("CL.THROTTLE has no rules; its limit comes with the command")
        }
        () if door.group() == 6 && crate::apps::address(door).is_none() => {
            Some("the client's language is not installed, or external-tests are off")
        }
        () if door.group() == 6 && case.has("concurrency") => {
            Some("middleware in other languages gives permits back in the background")
        }
        () => None,
    }
}
