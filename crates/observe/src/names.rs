//! What is counted under which number: rules and tiers get numbers that stay theirs when the rules change, so that counts
//! carry over by name. There are only so many: the rest is counted together, as `other`.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use tollgate_engine::OWN_LIMIT;
use tollgate_rules::{Role, Ruleset};

/// The most rules that are counted apart.
pub(crate) const MOST_RULES: usize = 1_024;
/// The most tiers that are counted apart.
pub(crate) const MOST_TIERS: usize = 32;
/// The number of whatever has none of its own.
pub(crate) const OTHER: u32 = 0;
/// The number of limits that callers bring themselves.
pub(crate) const THROTTLE: u32 = 1;
/// What these are called.
pub(crate) const THROTTLE_NAME: &str = "cl.throttle";
/// The number of callers without a tier.
pub(crate) const NO_TIER: u16 = 1;

/// A rule, by its name.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Name {
    pub(crate) domain: Arc<str>,
    /// Empty for requests that no rule limits.
    pub(crate) rule: Arc<str>,
}

/// All names that were ever counted.
#[derive(Debug)]
pub(crate) struct Names(Mutex<Known>);

#[derive(Debug)]
struct Known {
    rules: Vec<Name>,
    by_name: HashMap<Name, u32>,
    tiers: Vec<Arc<str>>,
    /// The last that was made: threads that come later have the same.
    latest: Option<Arc<Layout>>,
}

impl Names {
    pub(crate) fn new() -> Self {
        let other = Name { domain: "other".into(), rule: "other".into() };
        let brought = Name { domain: THROTTLE_NAME.into(), rule: THROTTLE_NAME.into() };
        Self(Mutex::new(Known {
            by_name: HashMap::from([(brought.clone(), THROTTLE)]),
            rules: vec![other, brought],
            tiers: vec!["other".into(), "none".into()],
            latest: None,
        }))
    }

    /// What each rule and limit of a rule set is counted under.
    pub(crate) fn layout(&self, rules: Arc<Ruleset>) -> Arc<Layout> {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(latest) = known.latest.as_ref().filter(|latest| Arc::ptr_eq(&latest.rules, &rules)) {
            return Arc::clone(latest);
        }
        let layout = Arc::new(known.lay_out(rules));
        known.latest = Some(Arc::clone(&layout));
        layout
    }

    /// The number of limits that requests of this domain bring with them.
    fn own(&self, domain: &Arc<str>) -> u32 {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).rule(domain, OWN_LIMIT)
    }

    /// All rules by their numbers.
    pub(crate) fn rules(&self) -> Vec<Name> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).rules.clone()
    }

    /// All tiers by their numbers.
    pub(crate) fn tiers(&self) -> Vec<Arc<str>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).tiers.clone()
    }
}

impl Known {
    fn lay_out(&mut self, rules: Arc<Ruleset>) -> Layout {
        let mut slots = vec![OTHER; rules.rules().len()];
        let mut domains = Vec::new();
        let mut apart = vec![0; rules.rules().len()];
        let mut key_sets: HashMap<Vec<&str>, u32> = HashMap::new();
        for domain in rules.domains() {
            let name: Arc<str> = domain.name().into();
            let unmatched = self.rule(&name, "");
            domains.push(DomainSlots { domain: Arc::clone(&name), unmatched, own: OnceLock::new() });
            for rule in domain.own_rules() {
                slots[rule.id as usize] = self.rule(&name, &rule.name);
            }
            for (rule, keys) in domain.keys_apart() {
                let next = u32::try_from(key_sets.len()).unwrap_or(0);
                apart[rule as usize] = *key_sets.entry(keys).or_insert(next);
            }
        }
        let mut limits = Vec::new();
        for rule in rules.rules() {
            let own = rule.limits.limits.iter().map(|limit| (limit, NO_TIER));
            let mut all: Vec<_> = own.collect();
            for (tier, set) in &rule.tiers {
                let tier = self.tier(tier);
                all.extend(set.limits.iter().map(|limit| (limit, tier)));
            }
            for (limit, tier) in all {
                let at = limit.id as usize;
                if limits.len() <= at {
                    limits.resize(at + 1, LimitFacts::default());
                }
                limits[at] = LimitFacts {
                    slot: slots[rule.id as usize],
                    tier,
                    decides: matches!(limit.role, Role::Live | Role::Quota),
                    scale: part(limit.limit.capacity()),
                };
            }
        }
        let tiers = self.tiers.clone();
        let revision = rules.revision().into();
        let mut key_sets: Vec<(Vec<&str>, u32)> = key_sets.into_iter().collect();
        key_sets.sort_unstable_by_key(|(_, number)| *number);
        let key_sets =
            key_sets.into_iter().map(|(keys, _)| keys.into_iter().map(Into::into).collect()).collect();
        let (slots, limits, apart) = (slots.into(), limits.into(), apart.into());
        Layout { rules, revision, slots, limits, apart, key_sets, domains, tiers }
    }

    fn rule(&mut self, domain: &Arc<str>, rule: &str) -> u32 {
        let name = Name { domain: Arc::clone(domain), rule: rule.into() };
        if let Some(known) = self.by_name.get(&name) {
            return *known;
        }
        if self.rules.len() >= MOST_RULES {
            return OTHER;
        }
        let number = u32::try_from(self.rules.len()).unwrap_or(OTHER);
        self.rules.push(name.clone());
        self.by_name.insert(name, number);
        number
    }

    fn tier(&mut self, tier: &str) -> u16 {
        let known = self.tiers.iter().position(|known| **known == *tier);
        let number = known.unwrap_or_else(|| {
            if self.tiers.len() >= MOST_TIERS {
                return 0;
            }
            self.tiers.push(tier.into());
            self.tiers.len() - 1
        });
        u16::try_from(number).unwrap_or(0)
    }
}

/// What one unit is of the whole.
pub(crate) fn part(capacity: u64) -> f32 {
    1.0 / capacity.max(1) as f32
}

/// The numbers of one rule set.
#[derive(Debug)]
pub(crate) struct Layout {
    pub(crate) rules: Arc<Ruleset>,
    pub(crate) revision: Arc<str>,
    /// By the rule's number in the rule set.
    pub(crate) slots: Box<[u32]>,
    /// By the limit's number in the rule set.
    pub(crate) limits: Box<[LimitFacts]>,
    /// By the rule's number in the rule set: which of the key sets it has.
    apart: Box<[u32]>,
    /// Keys of which every value has counters of its own.
    key_sets: Vec<Box<[Box<str>]>>,
    domains: Vec<DomainSlots>,
    tiers: Vec<Arc<str>>,
}

/// The numbers of a domain beside those of its rules.
#[derive(Debug)]
struct DomainSlots {
    domain: Arc<str>,
    /// For requests that no rule limits.
    unmatched: u32,
    /// For limits that requests bring with them, once one has.
    own: OnceLock<u32>,
}

/// What is asked of a limit at every decision.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct LimitFacts {
    pub(crate) slot: u32,
    pub(crate) tier: u16,
    /// Whether it can turn a request away.
    pub(crate) decides: bool,
    /// One over its capacity.
    pub(crate) scale: f32,
}

impl Layout {
    fn domain(&self, domain: &str) -> Option<&DomainSlots> {
        self.domains.iter().find(|known| *known.domain == *domain)
    }

    pub(crate) fn unmatched(&self, domain: &str) -> u32 {
        self.domain(domain).map_or(OTHER, |known| known.unmatched)
    }

    /// For limits that requests of this domain bring with them.
    #[cold]
    pub(crate) fn own(&self, domain: &str, names: &Names) -> u32 {
        self.domain(domain).map_or(OTHER, |known| *known.own.get_or_init(|| names.own(&known.domain)))
    }

    pub(crate) fn slot(&self, rule: u32) -> u32 {
        self.slots.get(rule as usize).copied().unwrap_or(OTHER)
    }

    /// Whether a rule has counters of their own for those who are known by this key.
    pub(crate) fn is_apart(&self, rule: u32, key: &str) -> bool {
        let keys = self.apart.get(rule as usize).and_then(|set| self.key_sets.get(*set as usize));
        keys.is_some_and(|keys| keys.iter().any(|known| **known == *key))
    }

    pub(crate) fn tier(&self, tier: Option<&str>) -> u16 {
        let Some(tier) = tier else { return NO_TIER };
        let known = self.tiers.iter().position(|known| **known == *tier);
        known.and_then(|at| u16::try_from(at).ok()).unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tollgate_rules::{Options, Source};

    fn rules(text: &str) -> Arc<Ruleset> {
        Arc::new(Ruleset::load(&[Source::new("r.yaml", text)], &Options::default()).expect("rules"))
    }

    /// A graph that began anew with every change of the rules would hide what the change did.
    #[test]
    fn numbers_carry_over_by_name() {
        let names = Names::new();
        let first =
            names.layout(rules("{domain: d, descriptors: [{key: a, limit: 1/s}, {key: b, limit: 1/s}]}"));
        let second =
            names.layout(rules("{domain: d, descriptors: [{key: c, limit: 1/s}, {key: b, limit: 5/s}]}"));
        assert_eq!(first.slot(1), second.slot(1), "b is b");
        assert_ne!(first.slot(0), second.slot(0), "c is not a");
        assert_eq!(first.unmatched("d"), second.unmatched("d"));
        assert_eq!(first.unmatched("elsewhere"), OTHER);
    }

    /// Ten thousand rules must not make ten thousand series.
    #[test]
    fn there_are_only_so_many_numbers() {
        let names = Names::new();
        let many: String = (0..2_000).map(|n| format!("\n  - {{key: k, value: v{n}, limit: 1/s}}")).collect();
        let layout = names.layout(rules(&format!("domain: d\ndescriptors:{many}\n")));
        assert_eq!(names.rules().len(), MOST_RULES);
        assert_eq!(layout.slot(1_999), OTHER);
        assert_ne!(layout.slot(0), OTHER);
    }
}
