//! Emergency measures: block, tighten, exempt, disable a rule, allow all, shadow all.
//!
//! While no measure is active, a request pays only for reading one flag. Active measures are indexed by the attribute
//! values they target, so a thousand measures cost as much as ten. Each measure has its own expiry time, which is
//! compared with the clock at each decision, so measures expire on time without a background task. If several measures
//! apply to one request, allow-all wins, then block, then exempt; of several tighten factors the smallest applies.
//! While shadow-all is active, nothing is denied, not even by a block.

use crate::check::{Check, CheckInput};
use crate::decision::{DecidedBy, DecisionDetails, DecisionVerdict, Origin};
use crate::fold::push_unknown;
use crate::limiter::Limiter;
use arc_swap::ArcSwapOption;
use smallvec::SmallVec;
use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use tollgate_core::{TimeDelta, Timestamp};
use tollgate_rules::{CALLER_KEY, LimitOrigin, MatchKind, Plan};

/// Action of a measure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MeasureAction {
    /// Denies the request.
    Block,
    /// Enforces this many thousandths of each limit.
    Tighten(u32),
    /// Allows the request without counting it.
    Exempt,
    /// Disables a rule.
    DisableRule,
    /// Allows every request without counting it.
    AllowAll,
    /// Counts and reports every request, but denies none.
    ShadowAll,
}

/// The requests that a measure applies to.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum MeasureTarget {
    /// All requests.
    All,
    /// A caller, by the hash of its API key; keys themselves are never stored.
    ApiKey(u64),
    /// The value of the attribute `tenant`.
    Tenant(Box<str>),
    /// The value of any other attribute.
    Attribute {
        /// The attribute.
        key: Box<str>,
        /// Its value.
        value: Box<str>,
    },
    /// The value of an attribute whose values may be secrets, by its hash.
    Secret {
        /// The attribute.
        key: Box<str>,
        /// Hash of its value.
        hash: u64,
    },
    /// A network that contains the client's address: the full address, if the protocol server supplies it, else the
    /// attribute `remote_address`.
    Address(Network),
    /// The value of the attribute `endpoint`. With a trailing `*`, it matches every value with that prefix.
    Endpoint(Box<str>),
    /// A rule, by name.
    Rule(Box<str>),
}

/// The attribute that contains the tenant.
const TENANT: &str = "tenant";
/// The attribute that contains the endpoint.
const ENDPOINT: &str = "endpoint";
/// The attribute that contains the client's address.
const ADDRESS: &str = "remote_address";

/// A network: an address and a prefix length, as in `10.0.0.0/8`. A single address is a network of one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Network {
    first: u128,
    mask: u128,
}

impl Network {
    fn to_u128(address: IpAddr) -> u128 {
        // An IPv4-mapped IPv6 address identifies the same client as the IPv4 address.
        match address.to_canonical() {
            IpAddr::V4(v4) => u128::from(v4.to_ipv6_mapped()),
            IpAddr::V6(v6) => u128::from(v6),
        }
    }

    fn contains(&self, address: u128) -> bool {
        address & self.mask == self.first
    }

    /// Returns the network of one address.
    #[must_use]
    pub fn from_address(address: IpAddr) -> Self {
        Self { first: Self::to_u128(address), mask: u128::MAX }
    }

    /// Returns the length of the prefix, in bits of an IPv6 address: IPv4 prefixes are 96 bits longer.
    #[must_use]
    pub fn bits(&self) -> u8 {
        u8::try_from(self.mask.count_ones()).unwrap_or(u8::MAX)
    }

    /// Returns the network of this many bits that contains this one; `None` if this one is larger.
    #[must_use]
    pub fn widened(&self, bits: u8) -> Option<Self> {
        let mask = if bits == 0 { 0 } else { u128::MAX << (128 - u32::from(bits.min(128))) };
        (bits <= self.bits()).then_some(Self { first: self.first & mask, mask })
    }
}

/// Writes the canonical text: an address alone if the network has only one.
impl std::fmt::Display for Network {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (bits, v6) = (self.bits(), Ipv6Addr::from(self.first));
        match v6.to_ipv4_mapped().filter(|_| bits >= 96) {
            Some(v4) if bits == 128 => v4.fmt(f),
            Some(v4) => write!(f, "{v4}/{}", bits - 96),
            None if bits == 128 => v6.fmt(f),
            None => write!(f, "{v6}/{bits}"),
        }
    }
}

impl std::str::FromStr for Network {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let wrong =
            || "write an address or a network, such as 192.0.2.7, 10.0.0.0/8 or 2001:db8::/32".to_owned();
        let (address, bits) = match text.split_once('/') {
            Some((address, bits)) => (address, Some(bits.parse::<u32>().map_err(|_| wrong())?)),
            None => (text, None),
        };
        let address: IpAddr = address.parse().map_err(|_| wrong())?;
        let own = if address.is_ipv4() { 32 } else { 128 };
        let bits = bits.unwrap_or(own);
        if bits > own {
            return Err(format!("a prefix of this family has at most {own} bits"));
        }
        let bits = bits + 128 - own;
        let mask = if bits == 0 { 0 } else { u128::MAX << (128 - bits) };
        let whole = match address {
            IpAddr::V4(v4) => u128::from(v4.to_ipv6_mapped()),
            IpAddr::V6(v6) => u128::from(v6),
        };
        if whole & !mask != 0 {
            return Err(
                "the address has bits beyond its prefix; write the network's first address".to_owned()
            );
        }
        Ok(Self { first: whole, mask })
    }
}

/// One emergency measure.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Measure {
    /// Name used in decisions: `emergency:` and the measure's ID.
    pub name: Box<str>,
    /// Action of the measure.
    pub action: MeasureAction,
    /// Target of the measure.
    pub target: MeasureTarget,
    /// Expiry time.
    pub expires_at: Timestamp,
}

type MeasureList = SmallVec<[Arc<Measure>; 1]>;

/// Active measures, indexed by target.
#[derive(Default)]
struct MeasureIndex {
    all: MeasureList,
    rules: MeasureList,
    /// By attribute and value.
    values: HashMap<Box<str>, HashMap<Box<str>, MeasureList>>,
    /// By attribute and hash of the value.
    hashes: HashMap<Box<str>, HashMap<u64, MeasureList>>,
    /// Endpoint targets that end with `*`, without the `*`.
    endpoint_prefixes: Vec<(Box<str>, Arc<Measure>)>,
    networks: Vec<(Network, Arc<Measure>)>,
    last: Timestamp,
}

impl MeasureIndex {
    fn add_value(&mut self, key: &str, value: &str, measure: Arc<Measure>) {
        self.values.entry(key.into()).or_default().entry(value.into()).or_default().push(measure);
    }

    fn add_hash(&mut self, key: &str, hash: u64, measure: Arc<Measure>) {
        self.hashes.entry(key.into()).or_default().entry(hash).or_default().push(measure);
    }

    fn by_address(&self, address: IpAddr, effect: &mut MeasureEffect) {
        let address = Network::to_u128(address);
        for (network, measure) in &self.networks {
            if network.contains(address) {
                effect.add(measure);
            }
        }
    }
}

/// All active measures; shared between the limiter, which reads them, and the code that replaces them.
pub struct ActiveMeasures {
    any: AtomicBool,
    active: ArcSwapOption<MeasureIndex>,
    /// Hash of a value that may be a secret, such as an API key.
    key_hash: Box<dyn Fn(&str) -> u64 + Send + Sync>,
}

impl Default for ActiveMeasures {
    fn default() -> Self {
        Self::new(|_| 0)
    }
}

impl std::fmt::Debug for ActiveMeasures {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ActiveMeasures").field("any", &self.any_active()).finish_non_exhaustive()
    }
}

impl ActiveMeasures {
    /// Creates an empty set. `word` hashes an API key.
    #[must_use]
    pub fn new(word: impl Fn(&str) -> u64 + Send + Sync + 'static) -> Self {
        Self { any: AtomicBool::new(false), active: ArcSwapOption::empty(), key_hash: Box::new(word) }
    }

    /// Returns whether any measure may be active.
    #[must_use]
    #[inline]
    pub fn any_active(&self) -> bool {
        self.any.load(Ordering::Relaxed)
    }

    /// Replaces all active measures with `measures`.
    pub fn replace(&self, measures: impl IntoIterator<Item = Measure>) {
        let mut active = MeasureIndex::default();
        for measure in measures.into_iter().map(Arc::new) {
            active.last = active.last.max(measure.expires_at);
            match measure.target.clone() {
                MeasureTarget::All => active.all.push(measure),
                MeasureTarget::Rule(_) => active.rules.push(measure),
                MeasureTarget::ApiKey(hash) => active.add_hash(CALLER_KEY, hash, measure),
                MeasureTarget::Tenant(name) => active.add_value(TENANT, &name, measure),
                MeasureTarget::Attribute { key, value } => active.add_value(&key, &value, measure),
                MeasureTarget::Secret { key, hash } => active.add_hash(&key, hash, measure),
                MeasureTarget::Address(network) => active.networks.push((network, measure)),
                MeasureTarget::Endpoint(text) => match text.strip_suffix('*') {
                    Some(beginning) => active.endpoint_prefixes.push((beginning.into(), measure)),
                    None => active.add_value(ENDPOINT, &text, measure),
                },
            }
        }
        let any = active.last > Timestamp::ZERO;
        self.active.store(any.then(|| Arc::new(active)));
        self.any.store(any, Ordering::Relaxed);
    }

    /// Returns whether a measure disables this rule.
    pub(crate) fn disables(&self, rule: &str, now: Timestamp) -> bool {
        let active = self.active.load();
        let names = |measure: &&Arc<Measure>| {
            matches!(&measure.target, MeasureTarget::Rule(target) if **target == *rule)
                && now < measure.expires_at
        };
        active.as_ref().is_some_and(|active| active.rules.iter().any(|measure| names(&measure)))
    }

    /// Clears the active flag once all measures have expired.
    pub fn remove_expired(&self, now: Timestamp) {
        if self.any_active() && self.active.load().as_ref().is_none_or(|active| active.last <= now) {
            self.any.store(false, Ordering::Relaxed);
        }
    }

    /// Returns the effect of the active measures on this request.
    #[cold]
    fn effect(&self, check: &Check<'_>, now: Timestamp) -> Option<Box<MeasureEffect>> {
        let active = self.active.load();
        let active = active.as_ref()?;
        let mut effect = MeasureEffect { at: now, ..MeasureEffect::default() };
        effect.add_all(&active.all);
        if let Some(address) = check.address {
            active.by_address(address, &mut effect);
        }
        match check.input {
            CheckInput::Attributes(attributes) => self.by_values(active, check, attributes, &mut effect),
            CheckInput::Descriptors(descriptors) => {
                descriptors.iter().for_each(|one| self.by_values(active, check, one.entries, &mut effect));
            }
        }
        // Under shadow-all, a blocked request is counted and reported like any other; the block itself is not applied.
        if effect.shadow.is_some()
            && effect.outright.as_ref().is_some_and(|one| one.action == MeasureAction::Block)
        {
            effect.outright = None;
            effect.is_exempt = true;
        }
        // Disabled rules matter only if no outright measure decides the request.
        if effect.outright.is_none() {
            effect.disabled.extend(active.rules.iter().filter(|measure| now < measure.expires_at).cloned());
        }
        let bears = effect.outright.is_some()
            || effect.tighten.is_some()
            || effect.shadow.is_some()
            || !effect.disabled.is_empty();
        bears.then(|| Box::new(effect))
    }

    fn by_values(
        &self,
        active: &MeasureIndex,
        check: &Check<'_>,
        values: &[(&str, &str)],
        effect: &mut MeasureEffect,
    ) {
        for (key, value) in values {
            if let Some(found) = active.values.get(*key).and_then(|by_value| by_value.get(*value)) {
                effect.add_all(found);
            }
            if let Some(by_hash) = active.hashes.get(*key)
                && let Some(found) = by_hash.get(&(self.key_hash)(value))
            {
                effect.add_all(found);
            }
            match *key {
                ENDPOINT => {
                    for (beginning, measure) in &active.endpoint_prefixes {
                        if value.starts_with(&**beginning) {
                            effect.add(measure);
                        }
                    }
                }
                ADDRESS if check.address.is_none() && !active.networks.is_empty() => {
                    if let Ok(address) = value.parse() {
                        active.by_address(address, effect);
                    }
                }
                _ => {}
            }
        }
    }
}

/// Effect of the active measures on one request.
#[derive(Clone, Debug, Default)]
pub(crate) struct MeasureEffect {
    at: Timestamp,
    /// The measure that decides the request without counters.
    outright: Option<Arc<Measure>>,
    tighten: Option<Arc<Measure>>,
    disabled: SmallVec<[Arc<Measure>; 1]>,
    shadow: Option<Arc<Measure>>,
    /// True if a block applies to the request, but shadow-all overrides it.
    is_exempt: bool,
    /// The measure that changed the decision.
    applied: Option<Arc<Measure>>,
}

/// Returns the precedence of an outright measure; the higher one wins.
const fn rank(act: MeasureAction) -> u8 {
    match act {
        MeasureAction::AllowAll => 3,
        MeasureAction::Block => 2,
        MeasureAction::Exempt => 1,
        MeasureAction::Tighten(_) | MeasureAction::DisableRule | MeasureAction::ShadowAll => 0,
    }
}

impl MeasureEffect {
    fn add_all(&mut self, measures: &[Arc<Measure>]) {
        measures.iter().for_each(|measure| self.add(measure));
    }

    fn add(&mut self, measure: &Arc<Measure>) {
        if self.at >= measure.expires_at {
            return;
        }
        let place = match measure.action {
            MeasureAction::ShadowAll => &mut self.shadow,
            MeasureAction::Tighten(factor) => {
                if let Some(MeasureAction::Tighten(other)) = self.tighten.as_ref().map(|other| other.action)
                    && other <= factor
                {
                    return;
                }
                &mut self.tighten
            }
            MeasureAction::DisableRule => return,
            act => {
                if self.outright.as_ref().is_some_and(|other| rank(other.action) >= rank(act)) {
                    return;
                }
                &mut self.outright
            }
        };
        *place = Some(Arc::clone(measure));
    }

    /// Returns the name of the measure that changed the decision.
    pub(crate) fn name(&self) -> Option<&str> {
        self.applied.as_ref().map(|measure| &*measure.name)
    }

    /// Returns the action of that measure.
    pub(crate) fn action(&self) -> Option<MeasureAction> {
        self.applied.as_ref().map(|measure| measure.action)
    }

    /// Returns the measure that scales limits.
    pub(crate) fn tightening(&self) -> Option<&Measure> {
        self.tighten.as_deref()
    }

    /// Returns the measure because of which the limits of a rule are not charged.
    pub(crate) fn disabling(&self, rule: Option<&str>) -> Option<&Measure> {
        let names = |measure: &&Arc<Measure>| matches!(&measure.target, MeasureTarget::Rule(target) if rule == Some(&**target));
        self.outright.as_deref().or_else(|| self.disabled.iter().find(names).map(|measure| &**measure))
    }

    /// Removes the limits that must not be charged from a plan and tightens the others. `details` reports limits that an
    /// outright measure replaces as unknown.
    #[cold]
    pub(crate) fn apply_to(&mut self, plan: &mut Plan<'_>, details: &mut DecisionDetails) {
        if let Some(outright) = &self.outright {
            self.applied = Some(Arc::clone(outright));
            // They decide nothing, but responses list them as those of every other decision do.
            push_unknown(plan, details);
            plan.limits.clear();
            return;
        }
        let disabled = &self.disabled;
        let mut felt = None;
        let is_off = |rule: Option<&tollgate_rules::Rule>| {
            let name = &rule?.name;
            let names = |measure: &&Arc<Measure>| matches!(&measure.target, MeasureTarget::Rule(rule) if **rule == **name);
            disabled.iter().find(names)
        };
        plan.limits.retain(|matched| match is_off(matched.rule) {
            Some(measure) => {
                felt = Some(Arc::clone(measure));
                false
            }
            None => true,
        });
        for (matched, rule) in &mut plan.matches {
            if *matched == MatchKind::Limited && is_off(*rule).is_some() {
                *matched = MatchKind::Exempt;
            }
        }
        if let Some(measure) = &self.tighten
            && let MeasureAction::Tighten(factor) = measure.action
        {
            for matched in plan.limits.iter_mut().filter(|matched| matched.role.is_live()) {
                matched.limit = LimitOrigin::Inline(Box::new(
                    matched.limit.map_limits(|limit| limit.scaled_permille(factor)),
                ));
                felt = Some(Arc::clone(measure));
            }
        }
        self.applied = felt;
    }

    /// Overrides the verdict after the counters have been charged.
    #[cold]
    pub(crate) fn override_verdict(&mut self, details: &mut DecisionDetails) {
        if let Some(measure) = &self.outright {
            details.origin = Origin::Emergency;
            if measure.action == MeasureAction::Block {
                let left: TimeDelta = measure.expires_at.since(self.at);
                details.verdict = DecisionVerdict::Denied { retry_after: Some(left) };
                details.denied_by = Some(DecidedBy::Emergency);
            }
        } else if self.applied.is_some() && details.origin == Origin::Unmatched {
            // Every rule that the request matches is disabled.
            details.origin = Origin::Emergency;
        }
        if let Some(measure) = &self.shadow
            && (self.is_exempt || !details.is_allowed())
        {
            details.verdict = DecisionVerdict::Allowed { delay: details.delay() };
            details.denied_by = None;
            self.applied = Some(Arc::clone(measure));
        }
    }
}

impl<S> Limiter<S> {
    /// Sets the emergency measures that the limiter applies.
    #[must_use]
    pub fn with_measures(mut self, emergencies: Arc<ActiveMeasures>) -> Self {
        self.measures = emergencies;
        self
    }

    /// Returns the effect of the active measures on a request.
    #[inline]
    pub(crate) fn effect_of(&self, check: &Check<'_>) -> Option<Box<MeasureEffect>> {
        if !self.measures.any_active() {
            return None;
        }
        self.measures.effect(check, self.clock.now())
    }

    /// Returns whether no request is denied at the moment: in global shadow mode, or under allow-all or shadow-all.
    #[inline]
    pub(crate) fn denies_nothing(&self) -> bool {
        self.shadow.load(Ordering::Relaxed)
            || (self.measures.any_active() && self.measures.allows_all(self.clock.now()))
    }
}

impl ActiveMeasures {
    /// Returns whether allow-all or shadow-all is active.
    #[cold]
    fn allows_all(&self, now: Timestamp) -> bool {
        self.active.load().as_ref().is_some_and(|active| {
            active.all.iter().any(|one| {
                matches!(one.action, MeasureAction::AllowAll | MeasureAction::ShadowAll)
                    && now < one.expires_at
            })
        })
    }
}
