//! Tightened limits: what a new rule set admits far less of, derived from the two rule sets alone.
//!
//! Recent traffic shows whom new rules would deny only where there is traffic: at night, on a new node, or for a tier whose
//! callers are quiet, `0/second` in place of `100/second` changes no decision of the last minutes. So a rule that admits
//! nothing, and a limit that is cut tenfold, is found by comparing rules, whatever the traffic.
//!
//! Each rule is compared with the one that limited its requests before: the rule at its path, else the one that matched
//! them, or one that it replaces; and a rule that is gone with the one that limits its requests now. What counts is what the
//! limits that are enforced let through: at once, over the times of their periods, and for good, by their numbers; algorithms
//! differ by a factor of two. So a period, a burst, a
//! tier, a limit more in a list, a cost, and a candidate that becomes the limit are one comparison.
//!
//! Rejected: asking about limits where there were none. Adding a rule is daily work, and the preview has its impact.

use crate::loosening::probe::example;
use crate::loosening::protection::Bound;
use crate::overload::{FLEET_RULE, WORKERS_RULE};
use crate::rule::{CostFrom, Rule, RuleLimit};
use crate::ruleset::{Domain, Ruleset};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use tollgate_core::Algorithm;

/// Factor from which a lowered limit counts as cut; sums of periods are not exact.
const CUT: f64 = 10.0 - 1e-9;
/// Factor from which a limit counts as lowered at all.
const LOWERED: f64 = 1.000_001;

/// One tightened limit.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Tightening {
    /// What is tightened.
    pub kind: TighteningKind,
    /// What happens, for a person: "rule `d: api_key` admits nothing".
    pub detail: String,
}

/// Kind of a tightened limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TighteningKind {
    /// A rule admits nothing, and admitted something before.
    AdmitsNothing,
    /// A rule admits a tenth or less.
    LimitCut,
}

impl Ruleset {
    /// Returns the rules of `after` that admit nothing, or a tenth or less of what these rules admit.
    ///
    /// ```
    /// # use tollgate_rules::{Options, Ruleset, Source};
    /// let load = |limit: &str| {
    ///     let text = format!("{{domain: d, descriptors: [{{key: api_key, limit: {limit}}}]}}");
    ///     Ruleset::load(&[Source::new("d.yaml", text)], &Options::default()).unwrap()
    /// };
    /// let found = load("100/second").tightened(&load("100/minute"));
    /// assert_eq!(found[0].detail, "rule `d: api_key` admits 60 times less: gcra 100/1m instead of gcra 100/1s");
    /// assert_eq!(load("100/second").tightened(&load("0/second"))[0].detail, "rule `d: api_key` admits nothing");
    /// assert_eq!(load("100/second").tightened(&load("50/second")), []);
    /// ```
    #[must_use]
    pub fn tightened(&self, after: &Self) -> Vec<Tightening> {
        self.cuts(after, CUT).into_iter().map(|cut| cut.tightening("")).collect()
    }

    /// Like [`Ruleset::tightened`], and also finds limits that are lowered in small steps: those that `after` lowers
    /// further and that are cut beside `baseline`, the rules of a day ago.
    ///
    /// ```
    /// # use tollgate_rules::{Options, Ruleset, Source};
    /// let load = |limit: &str| {
    ///     let text = format!("{{domain: d, descriptors: [{{key: api_key, limit: {limit}}}]}}");
    ///     Ruleset::load(&[Source::new("d.yaml", text)], &Options::default()).unwrap()
    /// };
    /// let (yesterday, now, next) = (load("100/second"), load("20/second"), load("5/second"));
    /// assert_eq!(now.tightened(&next), []);
    /// let found = now.tightened_since(&yesterday, &next);
    /// assert_eq!(found[0].detail, "rule `d: api_key` admits 20 times less than a day ago: gcra 5/1s instead of gcra 100/1s");
    /// ```
    #[must_use]
    pub fn tightened_since(&self, baseline: &Self, after: &Self) -> Vec<Tightening> {
        let steps = self.cuts(after, LOWERED);
        let mut small: BTreeSet<String> = BTreeSet::new();
        let mut all = Vec::new();
        for step in steps {
            if step.is_at_least(CUT) {
                all.push(step.tightening(""));
            } else {
                small.insert(step.rule);
            }
        }
        let since = baseline.cuts(after, CUT).into_iter().filter(|cut| small.contains(&cut.rule));
        all.extend(since.map(|cut| cut.tightening(" than a day ago")));
        all
    }

    fn cuts(&self, after: &Self, factor: f64) -> Vec<Cut> {
        let mut all = Vec::new();
        for new in after.domains() {
            let mut comparison = Comparison { domain: new.name(), factor, found: Vec::new() };
            comparison.domains(self.domain(new.name()), new);
            all.append(&mut comparison.found);
        }
        all
    }
}

/// One rule that admits less, for one tier or for all.
struct Cut {
    /// Domain and path of the rule.
    rule: String,
    tier: Option<String>,
    less: Less,
}

/// How much less.
enum Less {
    Nothing,
    /// So many times less: what is admitted, now and before.
    Times {
        factor: f64,
        what: &'static str,
        now: String,
        before: String,
    },
}

impl Cut {
    fn is_at_least(&self, cut: f64) -> bool {
        match &self.less {
            Less::Nothing => true,
            Less::Times { factor, .. } => *factor >= cut,
        }
    }

    fn tightening(self, since: &str) -> Tightening {
        let Self { rule, tier, less } = self;
        let tier = tier.map(|tier| format!(" for tier {tier}")).unwrap_or_default();
        let (kind, what) = match less {
            Less::Nothing => (TighteningKind::AdmitsNothing, format!("admits nothing{tier}")),
            Less::Times { factor, what, now, before } => {
                let times =
                    if factor.is_finite() { format!("{factor:.0} times less") } else { "less".into() };
                let text = format!("admits {times}{what}{since}{tier}: {now} instead of {before}");
                (TighteningKind::LimitCut, text)
            }
        };
        Tightening { kind, detail: format!("rule `{rule}` {what}") }
    }
}

struct Comparison<'r> {
    domain: &'r str,
    /// Factor from which a limit counts as cut.
    factor: f64,
    found: Vec<Cut>,
}

impl Comparison<'_> {
    fn domains(&mut self, before: Option<&Domain>, after: &Domain) {
        let by_path = |domain: &Domain| -> BTreeMap<String, (u32, u32)> {
            nodes(domain).map(|(path, node, rule)| (path, (node, rule))).collect()
        };
        let (old, new) = (before.map(by_path).unwrap_or_default(), by_path(after));
        let replaces = after.replaces || before.is_some_and(|before| before.replaces);
        let by_name = |domain: &Domain| -> HashMap<String, Vec<u32>> {
            let mut all: HashMap<String, Vec<u32>> = HashMap::new();
            if replaces {
                for (_, _, rule) in nodes(domain) {
                    all.entry(domain.rules[rule as usize].name.clone()).or_default().push(rule);
                }
            }
            all
        };
        let (old_names, new_names) = (before.map(by_name).unwrap_or_default(), by_name(after));
        for (path, (node, rule)) in &new {
            let rule = &after.rules[*rule as usize];
            let Some(before) = before else {
                self.rules(path, "", None, rule);
                continue;
            };
            let same = old.get(path).map(|(_, rule)| &before.rules[*rule as usize]);
            let matched = same.or_else(|| rule_for(before, after, *node));
            self.rules(path, "", matched, rule);
            // What it replaces only now.
            let is_new = |name: &&String| !same.is_some_and(|same| same.replaces.contains(*name));
            let replaced =
                rule.replaces.iter().filter(is_new).filter_map(|name| old_names.get(name)).flatten();
            for replaced in replaced {
                self.rules(path, "", Some(&before.rules[*replaced as usize]), rule);
            }
        }
        let Some(before) = before else { return };
        let paths: HashMap<u32, &str> = new.iter().map(|(path, (_, rule))| (*rule, path.as_str())).collect();
        let path_of = |rule: &Rule| paths.get(&rule.id).copied().unwrap_or_default();
        for (path, (node, rule)) in &old {
            let rule = &before.rules[*rule as usize];
            let same = new.get(path).map(|(_, rule)| &after.rules[*rule as usize]);
            let requests = format!(" for requests of `{path}`");
            if same.is_none()
                && let Some(applies) = rule_for(after, before, *node)
            {
                self.rules(path_of(applies), &requests, Some(rule), applies);
            }
            let is_gone = |name: &&String| !same.is_some_and(|same| same.replaces.contains(*name));
            let applies =
                rule.replaces.iter().filter(is_gone).filter_map(|name| new_names.get(name)).flatten();
            for applies in applies.map(|rule| &after.rules[*rule as usize]) {
                self.rules(path_of(applies), &requests, Some(rule), applies);
            }
        }
        self.overload(before, after);
    }

    fn overload(&mut self, before: &Domain, after: &Domain) {
        let (Some(old), Some(new)) = (before.overload(), after.overload()) else { return };
        if let (Some(old), Some(new)) = (&old.fleet, &new.fleet) {
            let (old, new) = (&before.rules[old.rule as usize], &after.rules[new.rule as usize]);
            self.rules(FLEET_RULE, "", Some(old), new);
        }
        let limit = |workers: &Option<crate::overload::Workers>| workers.as_ref()?.limit;
        if let (Some(old), Some(new)) = (limit(&old.workers), limit(&new.workers)) {
            let factor = f64::from(old) / f64::from(new.max(1));
            if factor >= self.factor {
                let less = Less::Times { factor, what: "", now: new.to_string(), before: old.to_string() };
                self.push(WORKERS_RULE, "", None, less);
            }
        }
    }

    /// Compares the rule that limits requests now with the one that did before, if one did, for each tier.
    fn rules(&mut self, path: &str, requests: &str, before: Option<&Rule>, after: &Rule) {
        let tiers = before.into_iter().chain([after]).flat_map(|rule| &rule.tiers);
        let tiers: BTreeSet<&str> = tiers.map(|(tier, _)| tier.as_str()).collect();
        let mut for_all = false;
        for tier in std::iter::once(None).chain(tiers.into_iter().map(Some)) {
            let less = less(&Admitted::new(before, tier), &Admitted::new(Some(after), tier), self.factor);
            // What holds for everybody needs no list of tiers.
            if let Some(less) = less.filter(|_| !for_all) {
                for_all = tier.is_none();
                self.push(path, requests, tier, less);
            }
        }
    }

    fn push(&mut self, path: &str, requests: &str, tier: Option<&str>, less: Less) {
        let rule = format!("{}: {path}", self.domain);
        let what = |less: &Less| match less {
            Less::Nothing => (true, String::new()),
            Less::Times { now, before, .. } => (false, format!("{now} {before}")),
        };
        let is_known = self
            .found
            .iter()
            .rev()
            .take_while(|known| known.rule == rule)
            .any(|known| known.tier.as_deref() == tier && what(&known.less) == what(&less));
        if !is_known {
            let less = match less {
                Less::Times { factor, what, now, before } if !requests.is_empty() => {
                    Less::Times { factor, what, now: format!("{now}{requests}"), before }
                }
                less => less,
            };
            self.found.push(Cut { rule, tier: tier.map(str::to_owned), less });
        }
    }
}

/// Returns the paths of the rules, their nodes and IDs.
fn nodes(domain: &Domain) -> impl Iterator<Item = (String, u32, u32)> {
    let nodes = (0..).zip(&domain.tree).filter_map(|(at, node)| Some((at, node.rule?)));
    nodes.map(|(at, rule)| (domain.path_text(at), at, rule))
}

/// Returns the rule of `domain` that matches the requests of a node of `other`.
fn rule_for<'d>(domain: &'d Domain, other: &Domain, node: u32) -> Option<&'d Rule> {
    let mut at = 0;
    for node in other.path(node) {
        let element = &other.tree[node as usize].element;
        at = domain.next(&domain.tree[at as usize], &element.key, &example(&element.test))?;
    }
    Some(&domain.rules[domain.tree[at as usize].rule? as usize])
}

/// What a rule admits of requests of one tier: the limits that deny, by what they count.
struct Admitted<'r> {
    unlimited: bool,
    limits: Vec<(Counted<'r>, f64, &'r RuleLimit)>,
}

/// What a limit counts. Requests and tokens have no common measure.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Counted<'r> {
    Requests,
    Permits,
    Attribute(&'r str),
}

impl<'r> Admitted<'r> {
    fn new(rule: Option<&'r Rule>, tier: Option<&str>) -> Self {
        let Some(rule) = rule else { return Self { unlimited: false, limits: Vec::new() } };
        let is_enforced = rule.enforce.as_ref().is_none_or(|enforce| enforce.thousandths > 0);
        let set = rule.set_for(tier);
        let limits = set.limits.iter().filter(|limit| is_enforced && limit.role.is_enforced(rule.action));
        let counted = limits.filter_map(|limit| {
            let (counted, units) = match limit.cost_from(rule) {
                _ if limit.limit.algorithm() == Algorithm::Concurrency => (Counted::Permits, 1),
                // A limit that charges nothing denies nothing.
                CostFrom::Fixed(0) => return None,
                CostFrom::Fixed(units) => (Counted::Requests, *units),
                CostFrom::Request => (Counted::Requests, 1),
                CostFrom::Attribute(name) => (Counted::Attribute(name), 1),
            };
            Some((counted, units as f64, limit))
        });
        Self { unlimited: set.unlimited, limits: counted.collect() }
    }

    fn admits_nothing(&self) -> bool {
        !self.unlimited
            && self.limits.iter().any(|(_, units, limit)| (limit.limit.capacity() as f64) < *units)
    }

    fn text(&self) -> String {
        if self.unlimited {
            return "unlimited".to_owned();
        }
        let one = |(_, units, limit): &(Counted<'_>, f64, &RuleLimit)| {
            let cost = if *units > 1.0 { format!(" cost {units}") } else { String::new() };
            format!("{}{cost}", limit.limit)
        };
        self.limits.iter().map(one).collect::<Vec<_>>().join(" and ")
    }
}

/// Returns by how much less is admitted after than before, if that is from `factor` on.
fn less(before: &Admitted<'_>, after: &Admitted<'_>, factor: f64) -> Option<Less> {
    if after.admits_nothing() {
        return (!before.admits_nothing()).then_some(Less::Nothing);
    }
    let times = |factor: f64, what: &'static str| Less::Times {
        factor,
        what,
        now: after.text(),
        before: before.text(),
    };
    if before.unlimited && !after.unlimited && !after.limits.is_empty() {
        return Some(times(f64::INFINITY, ""));
    }
    if after.unlimited {
        return None;
    }
    let mut kinds: Vec<Counted<'_>> = Vec::new();
    for (counted, _, _) in &before.limits {
        if !kinds.contains(counted) {
            kinds.push(*counted);
        }
    }
    let (mut most, mut burst) = (0.0_f64, 0.0_f64);
    for kind in kinds {
        let bounds = |one: &Admitted<'_>| -> Vec<Bound> {
            let limits = one.limits.iter().filter(|(counted, _, _)| *counted == kind);
            limits.map(|(_, units, limit)| Bound::new(limit).divided(*units)).collect()
        };
        let (old, new) = (bounds(before), bounds(after));
        let ratio = |number: &dyn Fn(&Bound) -> f64| -> f64 {
            let least = |all: &[Bound]| all.iter().map(number).reduce(f64::min);
            match (least(&old), least(&new)) {
                (Some(old), Some(new)) if old > 0.0 => old / new,
                _ => 0.0,
            }
        };
        burst = burst.max(ratio(&|bound| bound.capacity));
        if kind == Counted::Permits {
            continue;
        }
        most = most.max(ratio(&|bound| bound.count / bound.period));
        for time in old.iter().chain(&new).map(|bound| bound.period) {
            most = most.max(ratio(&|bound| bound.capacity.max(bound.count * time / bound.period)));
            // Limits of the same period, also where another limit is tighter.
            let of_period = |all: &[Bound]| {
                all.iter().filter(|bound| bound.period == time).map(|bound| bound.count).reduce(f64::min)
            };
            if let (Some(old), Some(new)) = (of_period(&old), of_period(&new)) {
                most = most.max(old / new);
            }
        }
    }
    match most.max(burst) {
        least if least < factor || least.is_nan() => None,
        _ if most >= factor => Some(times(most, "")),
        _ => Some(times(burst, " at once")),
    }
}

#[cfg(test)]
mod tests;
