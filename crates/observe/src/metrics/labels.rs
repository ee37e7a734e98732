//! Metric labels: assigns a slot number to each rule and tier. Slots are stable by name across rule changes, so that counts
//! carry over. Their number is bounded; everything beyond shares the slot `other`.

use crate::recorder::stripe::CELLS;
use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use tollgate_engine::INLINE_LIMIT;
use tollgate_rules::Ruleset;

/// Maximum number of rules counted separately.
pub(crate) const MAX_RULES: usize = 1_024;
/// Maximum number of tiers counted separately.
pub(crate) const MAX_TIERS: usize = 32;
/// Slot shared by everything that has none of its own.
pub(crate) const OTHER: u32 = 0;
/// Slot of inline limits without a domain (`CL.THROTTLE`).
pub(crate) const INLINE_SLOT: u32 = 1;
/// Number of reserved slots.
const FIXED: usize = 2;
/// Label of inline limits without a domain (`CL.THROTTLE`).
pub(crate) const INLINE_LABEL: &str = "cl.throttle";
/// Number of the tier of callers without one.
pub(crate) const NO_TIER: u16 = 1;

/// Domain and name of a rule.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct RuleLabel {
    pub(crate) domain: Arc<str>,
    /// Rule name; empty for requests that no rule limits.
    pub(crate) rule: Arc<str>,
}

/// All labels in use, and former ones while there is room.
#[derive(Debug)]
pub(crate) struct LabelRegistry(Mutex<LabelSlots>);

#[derive(Debug)]
struct LabelSlots {
    rules: Vec<RuleLabel>,
    by_name: HashMap<RuleLabel, u32>,
    /// Slots that may be reassigned; `before` has the counts of a slot at the time it was freed.
    free: Vec<u32>,
    before: HashMap<u32, [u64; CELLS]>,
    tiers: Vec<Arc<str>>,
    /// Latest layout, shared by threads that ask for the same rules.
    latest: Option<Arc<LabelLayout>>,
}

impl LabelRegistry {
    pub(crate) fn new() -> Self {
        let other = RuleLabel { domain: "other".into(), rule: "other".into() };
        let brought = RuleLabel { domain: INLINE_LABEL.into(), rule: INLINE_LABEL.into() };
        Self(Mutex::new(LabelSlots {
            by_name: HashMap::from([(brought.clone(), INLINE_SLOT)]),
            rules: vec![other, brought],
            free: Vec::new(),
            before: HashMap::new(),
            tiers: vec!["other".into(), "none".into()],
            latest: None,
        }))
    }

    /// Returns the slots of all rules and limits of a rule set.
    pub(crate) fn layout(&self, rules: Arc<Ruleset>) -> Arc<LabelLayout> {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(latest) = known.latest.as_ref().filter(|latest| Arc::ptr_eq(&latest.rules, &rules)) {
            return Arc::clone(latest);
        }
        let layout = Arc::new(known.build_layout(rules));
        known.latest = Some(Arc::clone(&layout));
        layout
    }

    /// Prepares slots for rules that become active. If slots run out, those of rules that no longer exist are reclaimed; the
    /// counts of such a slot, as `counted` returns them, are subtracted from those of its next owner.
    ///
    /// A decision by the previous rules that is still in progress may be counted under the new owner of its slot.
    pub(crate) fn on_rules_changed(&self, rules: &Arc<Ruleset>, counted: impl Fn(usize) -> [u64; CELLS]) {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        known.reclaim(rules, counted);
        known.latest = Some(Arc::new(known.build_layout(Arc::clone(rules))));
    }

    /// Returns all rules by slot, with the counts that each slot had before the rule owned it.
    pub(crate) fn since(&self) -> Vec<(RuleLabel, Option<[u64; CELLS]>)> {
        let known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let before = |slot| known.before.get(&slot).copied();
        (0..).zip(&known.rules).map(|(slot, name)| (name.clone(), before(slot))).collect()
    }

    /// Returns the slot of inline limits in this domain.
    fn inline_slot(&self, domain: &Arc<str>) -> u32 {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).rule(domain, INLINE_LIMIT)
    }

    /// Returns all rules by slot.
    pub(crate) fn rules(&self) -> Vec<RuleLabel> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).rules.clone()
    }

    /// Returns all tiers by number.
    pub(crate) fn tiers(&self) -> Vec<Arc<str>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).tiers.clone()
    }
}

impl LabelSlots {
    fn reclaim(&mut self, rules: &Ruleset, counted: impl Fn(usize) -> [u64; CELLS]) {
        let mut needed = HashSet::new();
        for domain in rules.domains() {
            let name: Arc<str> = domain.name().into();
            let more =
                ["", INLINE_LIMIT].into_iter().chain(domain.domain_rules().map(|rule| rule.name.as_str()));
            needed.extend(more.map(|rule| RuleLabel { domain: Arc::clone(&name), rule: rule.into() }));
        }
        let fresh = needed.iter().filter(|name| !self.by_name.contains_key(name)).count();
        if self.rules.len() + fresh <= MAX_RULES + self.free.len() {
            return;
        }
        for (slot, name) in (0..).zip(&self.rules).skip(FIXED) {
            if !needed.contains(name) && self.by_name.get(name) == Some(&slot) {
                self.by_name.remove(name);
                self.before.insert(slot, counted(slot as usize));
                self.free.push(slot);
            }
        }
    }

    fn build_layout(&mut self, rules: Arc<Ruleset>) -> LabelLayout {
        let mut slots = vec![OTHER; rules.rules().len()];
        let mut domains = Vec::new();
        // Rules that no request matches by its keys, as those of `overload`, have no counters of callers.
        let mut apart = vec![u32::MAX; rules.rules().len()];
        let mut key_sets: HashMap<Vec<&str>, u32> = HashMap::new();
        for domain in rules.domains() {
            let name: Arc<str> = domain.name().into();
            let unmatched = self.rule(&name, "");
            domains.push(DomainSlots { domain: Arc::clone(&name), unmatched, inline: OnceLock::new() });
            for rule in domain.domain_rules() {
                slots[rule.id as usize] = self.rule(&name, &rule.name);
            }
            // Shares of the fleet's capacity are counted as what they are shares of.
            let fleet = domain.overload().and_then(|overload| overload.fleet.as_ref());
            if let Some((fleet, shares)) =
                fleet.and_then(|fleet| fleet.shares.as_ref().map(|own| (fleet, own)))
            {
                slots[shares.rule as usize] = slots[fleet.rule as usize];
            }
            for (rule, keys) in domain.per_value_keys() {
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
                    is_live: limit.role.is_live(),
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
        LabelLayout { rules, revision, slots, limits, per_value: apart, key_sets, domains, tiers }
    }

    fn rule(&mut self, domain: &Arc<str>, rule: &str) -> u32 {
        let name = RuleLabel { domain: Arc::clone(domain), rule: rule.into() };
        if let Some(known) = self.by_name.get(&name) {
            return *known;
        }
        let number = match self.free.pop() {
            Some(number) => number,
            None if self.rules.len() >= MAX_RULES => return OTHER,
            None => u32::try_from(self.rules.len()).unwrap_or(OTHER),
        };
        match self.rules.get_mut(number as usize) {
            Some(label) => *label = name.clone(),
            None => self.rules.push(name.clone()),
        }
        self.by_name.insert(name, number);
        number
    }

    fn tier(&mut self, tier: &str) -> u16 {
        let known = self.tiers.iter().position(|known| **known == *tier);
        let number = known.unwrap_or_else(|| {
            if self.tiers.len() >= MAX_TIERS {
                return 0;
            }
            self.tiers.push(tier.into());
            self.tiers.len() - 1
        });
        u16::try_from(number).unwrap_or(0)
    }
}

/// Returns the share of a limit that one unit is.
pub(crate) fn part(capacity: u64) -> f32 {
    1.0 / capacity.max(1) as f32
}

/// Slots of one rule set.
#[derive(Debug)]
pub(crate) struct LabelLayout {
    pub(crate) rules: Arc<Ruleset>,
    pub(crate) revision: Arc<str>,
    /// Slot of each rule, by rule id.
    pub(crate) slots: Box<[u32]>,
    /// Facts on each limit, by limit id.
    pub(crate) limits: Box<[LimitFacts]>,
    /// Index into `key_sets` for each rule, by rule id.
    per_value: Box<[u32]>,
    /// Sets of keys that have separate counters for each value.
    key_sets: Vec<Box<[Box<str>]>>,
    domains: Vec<DomainSlots>,
    tiers: Vec<Arc<str>>,
}

/// Slots of a domain besides those of its rules.
#[derive(Debug)]
struct DomainSlots {
    domain: Arc<str>,
    /// Slot of requests that no rule limits.
    unmatched: u32,
    /// Slot of inline limits, assigned on first use.
    inline: OnceLock<u32>,
}

/// What the recorder needs of a limit for every decision.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct LimitFacts {
    pub(crate) slot: u32,
    pub(crate) tier: u16,
    /// Whether the limit can deny a request.
    pub(crate) is_live: bool,
    /// Reciprocal of the capacity.
    pub(crate) scale: f32,
}

impl LabelLayout {
    fn domain(&self, domain: &str) -> Option<&DomainSlots> {
        self.domains.iter().find(|known| *known.domain == *domain)
    }

    #[inline(never)]
    pub(crate) fn unmatched(&self, domain: &str) -> u32 {
        self.domain(domain).map_or(OTHER, |known| known.unmatched)
    }

    /// Returns the slot of inline limits in this domain.
    #[cold]
    pub(crate) fn inline(&self, domain: &str, names: &LabelRegistry) -> u32 {
        self.domain(domain)
            .map_or(OTHER, |known| *known.inline.get_or_init(|| names.inline_slot(&known.domain)))
    }

    pub(crate) fn slot(&self, rule: u32) -> u32 {
        self.slots.get(rule as usize).copied().unwrap_or(OTHER)
    }

    /// Returns whether a rule has separate counters for each value of `key`.
    pub(crate) fn is_per_value(&self, rule: u32, key: &str) -> bool {
        let keys = self.per_value.get(rule as usize).and_then(|set| self.key_sets.get(*set as usize));
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

    /// A graph that restarted with every rule change would hide the effect of the change.
    #[test]
    fn slots_carry_over_by_name() {
        let names = LabelRegistry::new();
        let first =
            names.layout(rules("{domain: d, descriptors: [{key: a, limit: 1/s}, {key: b, limit: 1/s}]}"));
        let second =
            names.layout(rules("{domain: d, descriptors: [{key: c, limit: 1/s}, {key: b, limit: 5/s}]}"));
        assert_eq!(first.slot(1), second.slot(1), "b is b");
        assert_ne!(first.slot(0), second.slot(0), "c is not a");
        assert_eq!(first.unmatched("d"), second.unmatched("d"));
        assert_eq!(first.unmatched("elsewhere"), OTHER);
    }

    /// Every caller would be at the limit that all of them share.
    #[test]
    fn the_fleets_capacity_is_no_limit_of_a_caller() {
        let text =
            "{domain: d, descriptors: [{key: user, limit: 1/s}], overload: {fleet: {capacity: 5/second}}}";
        let set = rules(text);
        let fleet = set.rules().iter().position(|rule| rule.name == "overload/fleet").expect("a rule");
        let layout = LabelRegistry::new().layout(Arc::clone(&set));
        assert!(
            layout.is_per_value(0, "user")
                && !layout.is_per_value(u32::try_from(fleet).expect("few"), "user")
        );
    }

    /// Ten thousand rules must not create ten thousand series.
    #[test]
    fn slots_are_bounded() {
        let names = LabelRegistry::new();
        let many: String = (0..2_000).map(|n| format!("\n  - {{key: k, value: v{n}, limit: 1/s}}")).collect();
        let layout = names.layout(rules(&format!("domain: d\ndescriptors:{many}\n")));
        assert_eq!(names.rules().len(), MAX_RULES);
        assert_eq!(layout.slot(1_999), OTHER);
        assert_ne!(layout.slot(0), OTHER);
    }

    /// Rules may change for years: after all of them are renamed, each new one still has its own series.
    #[test]
    fn slots_are_reclaimed_when_they_run_out() {
        let names = LabelRegistry::new();
        let many = |prefix: &str| {
            let each = |n| format!("\n  - {{key: k, value: {prefix}{n}, name: {prefix}{n}, limit: 1/s}}");
            rules(&format!("domain: d\ndescriptors:{}\n", (0..700).map(each).collect::<String>()))
        };
        let (first, second, third) = (many("a"), many("b"), many("c"));
        let counted = |slot: usize| [slot as u64; CELLS];
        let layout = |rules: &Arc<Ruleset>| {
            names.on_rules_changed(rules, counted);
            names.layout(Arc::clone(rules))
        };
        let of = |layout: &LabelLayout| (0..700).map(|rule| layout.slot(rule)).collect::<HashSet<u32>>();
        let a = layout(&first);
        let b = layout(&second);
        assert_eq!((of(&a).len(), of(&b).len()), (700, 700), "one slot per rule");
        assert!(!of(&b).contains(&OTHER) && !of(&b).contains(&INLINE_SLOT));
        assert_eq!(a.unmatched("d"), b.unmatched("d"), "surviving labels keep their slot");
        // Counts of a former owner are not the new owner's; a slot in its first use has no baseline.
        let since = names.since();
        for rule in 0..700 {
            let slot = b.slot(rule);
            let (name, before) = &since[slot as usize];
            assert_eq!(*name.rule, *second.rules()[rule as usize].name);
            assert_eq!(*before, of(&a).contains(&slot).then(|| counted(slot as usize)));
        }
        // A decision by the previous rules, still in progress, takes no slot from the active ones.
        names.layout(Arc::clone(&first));
        assert_eq!(of(&names.layout(Arc::clone(&second))), of(&b));
        assert_eq!(of(&layout(&third)).len(), 700);
        assert_eq!(names.rules().len(), MAX_RULES);
    }
}
