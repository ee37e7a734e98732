//! What operators decide in an emergency: shut somebody out, tighten, exempt, switch a rule off, or get out of the way.
//!
//! While nothing is on, a request pays for one look at a flag. What is on is looked up by the values of the request, so a
//! thousand measures cost what ten do. Each has an end of its own, which is compared with the clock at each decision: it
//! ends on time without anybody's doing. When several bear on one request: letting everything through wins, then
//! blocking, then exempting; of several factors the smallest. While everything is in shadow nothing is denied, blocks
//! included.

use crate::check::{Check, Request};
use crate::decision::{Answer, Origin, Ruling, RulingBy};
use crate::limiter::Limiter;
use arc_swap::ArcSwapOption;
use smallvec::SmallVec;
use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use tollgate_core::{TimeDelta, Timestamp};
use tollgate_rules::{HitLimit, Match, Plan, TENANT_KEY};

/// What a measure does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Act {
    /// Turns away.
    Block,
    /// Decides by so many thousandths of each limit.
    Tighten(u32),
    /// Lets pass, uncounted.
    Exempt,
    /// Leaves a rule out.
    DisableRule,
    /// Lets everything pass, uncounted.
    AllowAll,
    /// Counts and tells, but denies nothing.
    ShadowAll,
}

/// Whom a measure is about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Target {
    /// Everybody.
    All,
    /// A caller, by the word that stands for its key: keys themselves are kept nowhere.
    ApiKey(u64),
    /// The value of the attribute `tenant`.
    Tenant(Box<str>),
    /// A network that the client's address lies in: the whole one, where the front knows it, else the attribute
    /// `remote_address`.
    Address(Network),
    /// The value of the attribute `endpoint`; with a `*` at its end all that begin so.
    Endpoint(Box<str>),
    /// A rule, by its name.
    Rule(Box<str>),
}

/// The attribute that tells a tenant.
const TENANT: &str = "tenant";
/// The attribute that tells an endpoint.
const ENDPOINT: &str = "endpoint";
/// The attribute that tells an address.
const ADDRESS: &str = "remote_address";

/// A network: an address and the length of its prefix, as in `10.0.0.0/8`. An address alone is a network of one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Network {
    first: u128,
    mask: u128,
}

impl Network {
    fn of(address: IpAddr) -> u128 {
        // An IPv4 client seen through an IPv6 socket is the same client.
        match address.to_canonical() {
            IpAddr::V4(v4) => u128::from(v4.to_ipv6_mapped()),
            IpAddr::V6(v6) => u128::from(v6),
        }
    }

    fn holds(&self, address: u128) -> bool {
        address & self.mask == self.first
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

/// One measure.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Measure {
    /// `emergency:` and its id: what decisions call it.
    pub name: Box<str>,
    /// What it does.
    pub act: Act,
    /// To whom.
    pub target: Target,
    /// When it ends.
    pub until: Timestamp,
}

type Measures = SmallVec<[Arc<Measure>; 1]>;

/// What is on, by what it looks for in a request.
#[derive(Default)]
struct Active {
    all: Measures,
    rules: Measures,
    keys: HashMap<u64, Measures>,
    tenants: HashMap<Box<str>, Measures>,
    endpoints: HashMap<Box<str>, Measures>,
    /// Those with a `*` at the end, without it.
    beginnings: Vec<(Box<str>, Arc<Measure>)>,
    networks: Vec<(Network, Arc<Measure>)>,
    last: Timestamp,
}

impl Active {
    fn by_address(&self, address: IpAddr, effect: &mut Effect) {
        let address = Network::of(address);
        for (network, measure) in &self.networks {
            if network.holds(address) {
                effect.take(measure);
            }
        }
    }
}

/// All measures that are on, for a limiter to look at and for others to change.
pub struct Emergencies {
    on: AtomicBool,
    active: ArcSwapOption<Active>,
    /// The word that stands for an API key.
    word: Box<dyn Fn(&str) -> u64 + Send + Sync>,
}

impl Default for Emergencies {
    fn default() -> Self {
        Self::new(|_| 0)
    }
}

impl std::fmt::Debug for Emergencies {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Emergencies").field("on", &self.are_on()).finish_non_exhaustive()
    }
}

impl Emergencies {
    /// None yet. `word` tells the word that stands for an API key.
    #[must_use]
    pub fn new(word: impl Fn(&str) -> u64 + Send + Sync + 'static) -> Self {
        Self { on: AtomicBool::new(false), active: ArcSwapOption::empty(), word: Box::new(word) }
    }

    /// Whether a request has anything to look at.
    #[must_use]
    #[inline]
    pub fn are_on(&self) -> bool {
        self.on.load(Ordering::Relaxed)
    }

    /// These are on from now, and no others.
    pub fn replace(&self, measures: impl IntoIterator<Item = Measure>) {
        let mut active = Active::default();
        for measure in measures.into_iter().map(Arc::new) {
            active.last = active.last.max(measure.until);
            match &measure.target {
                Target::All => active.all.push(measure),
                Target::Rule(_) => active.rules.push(measure),
                Target::ApiKey(word) => active.keys.entry(*word).or_default().push(measure),
                Target::Tenant(name) => active.tenants.entry(name.clone()).or_default().push(measure),
                Target::Address(network) => active.networks.push((*network, measure)),
                Target::Endpoint(text) => match text.strip_suffix('*') {
                    Some(beginning) => active.beginnings.push((beginning.into(), measure)),
                    None => active.endpoints.entry(text.clone()).or_default().push(measure),
                },
            }
        }
        let any = active.last > Timestamp::ZERO;
        self.active.store(any.then(|| Arc::new(active)));
        self.on.store(any, Ordering::Relaxed);
    }

    /// Looks at nothing any more once all have ended.
    pub fn tidy(&self, now: Timestamp) {
        if self.are_on() && self.active.load().as_ref().is_none_or(|active| active.last <= now) {
            self.on.store(false, Ordering::Relaxed);
        }
    }

    /// What bears on this request.
    #[cold]
    fn effect(&self, check: &Check<'_>, now: Timestamp) -> Option<Box<Effect>> {
        let active = self.active.load();
        let active = active.as_ref()?;
        let mut effect = Effect { at: now, ..Effect::default() };
        effect.take_all(&active.all);
        if let Some(address) = check.address {
            active.by_address(address, &mut effect);
        }
        match check.request {
            Request::Attributes(attributes) => self.by_values(active, check, attributes, &mut effect),
            Request::Descriptors(descriptors) => {
                descriptors.iter().for_each(|one| self.by_values(active, check, one.entries, &mut effect));
            }
        }
        // In shadow it is counted and told what would become of everybody else; a block is none of that.
        if effect.shadow.is_some() && effect.outright.as_ref().is_some_and(|one| one.act == Act::Block) {
            effect.outright = None;
            effect.is_spared = true;
        }
        // Only where it is not said already what becomes of the request is it of use to know its rules.
        if effect.outright.is_none() {
            effect.disabled.extend(active.rules.iter().filter(|measure| now < measure.until).cloned());
        }
        let bears = effect.outright.is_some()
            || effect.tighten.is_some()
            || effect.shadow.is_some()
            || !effect.disabled.is_empty();
        bears.then(|| Box::new(effect))
    }

    fn by_values(&self, active: &Active, check: &Check<'_>, values: &[(&str, &str)], effect: &mut Effect) {
        for (key, value) in values {
            match *key {
                TENANT_KEY if !active.keys.is_empty() => {
                    effect.take_all(active.keys.get(&(self.word)(value)).map_or(&[][..], |found| found));
                }
                TENANT => effect.take_all(active.tenants.get(*value).map_or(&[][..], |found| found)),
                ENDPOINT => {
                    effect.take_all(active.endpoints.get(*value).map_or(&[][..], |found| found));
                    for (beginning, measure) in &active.beginnings {
                        if value.starts_with(&**beginning) {
                            effect.take(measure);
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

/// What the measures that are on do to one request.
#[derive(Clone, Debug, Default)]
pub(crate) struct Effect {
    at: Timestamp,
    /// Says alone what becomes of it.
    outright: Option<Arc<Measure>>,
    tighten: Option<Arc<Measure>>,
    disabled: SmallVec<[Arc<Measure>; 1]>,
    shadow: Option<Arc<Measure>>,
    /// It would be blocked, were not everything in shadow.
    is_spared: bool,
    /// The one that made a difference.
    felt: Option<Arc<Measure>>,
}

/// Which of two outright measures wins: the higher.
const fn rank(act: Act) -> u8 {
    match act {
        Act::AllowAll => 3,
        Act::Block => 2,
        Act::Exempt => 1,
        Act::Tighten(_) | Act::DisableRule | Act::ShadowAll => 0,
    }
}

impl Effect {
    fn take_all(&mut self, measures: &[Arc<Measure>]) {
        measures.iter().for_each(|measure| self.take(measure));
    }

    fn take(&mut self, measure: &Arc<Measure>) {
        if self.at >= measure.until {
            return;
        }
        let place = match measure.act {
            Act::ShadowAll => &mut self.shadow,
            Act::Tighten(factor) => {
                if let Some(Act::Tighten(other)) = self.tighten.as_ref().map(|other| other.act)
                    && other <= factor
                {
                    return;
                }
                &mut self.tighten
            }
            Act::DisableRule => return,
            act => {
                if self.outright.as_ref().is_some_and(|other| rank(other.act) >= rank(act)) {
                    return;
                }
                &mut self.outright
            }
        };
        *place = Some(Arc::clone(measure));
    }

    /// The name of the measure that made a difference.
    pub(crate) fn name(&self) -> Option<&str> {
        self.felt.as_ref().map(|measure| &*measure.name)
    }

    /// What it does.
    pub(crate) fn act(&self) -> Option<Act> {
        self.felt.as_ref().map(|measure| measure.act)
    }

    /// Leaves out of a plan what is not to be charged, and makes its limits tighter.
    #[cold]
    pub(crate) fn bear_on(&mut self, plan: &mut Plan<'_>) {
        if let Some(outright) = &self.outright {
            self.felt = Some(Arc::clone(outright));
            plan.hits.clear();
            return;
        }
        let disabled = &self.disabled;
        let mut felt = None;
        let is_off = |rule: Option<&tollgate_rules::Rule>| {
            let name = &rule?.name;
            let names =
                |measure: &&Arc<Measure>| matches!(&measure.target, Target::Rule(rule) if **rule == **name);
            disabled.iter().find(names)
        };
        plan.hits.retain(|hit| match is_off(hit.rule) {
            Some(measure) => {
                felt = Some(Arc::clone(measure));
                false
            }
            None => true,
        });
        for (matched, rule) in &mut plan.matches {
            if *matched == Match::Limited && is_off(*rule).is_some() {
                *matched = Match::Exempt;
            }
        }
        if let Some(measure) = &self.tighten
            && let Act::Tighten(factor) = measure.act
        {
            for hit in plan.hits.iter_mut().filter(|hit| hit.limit.role.is_live()) {
                hit.limit =
                    HitLimit::Own(Box::new(hit.limit.map_limits(|limit| limit.scaled_permille(factor))));
                felt = Some(Arc::clone(measure));
            }
        }
        self.felt = felt;
    }

    /// Says what becomes of the request, after its counters have.
    #[cold]
    pub(crate) fn rule(&mut self, answer: &mut Answer) {
        if let Some(measure) = &self.outright {
            answer.origin = Origin::Emergency;
            if measure.act == Act::Block {
                let left: TimeDelta = measure.until.since(self.at);
                answer.ruling = Ruling::Denied { retry_after: Some(left) };
                answer.denied_by = Some(RulingBy::Emergency);
            }
        } else if self.felt.is_some() && answer.origin == Origin::Unmatched {
            // Every rule that it meets is off.
            answer.origin = Origin::Emergency;
        }
        if let Some(measure) = &self.shadow
            && (self.is_spared || !answer.is_allowed())
        {
            answer.ruling = Ruling::Allowed { delay: answer.delay() };
            answer.denied_by = None;
            self.felt = Some(Arc::clone(measure));
        }
    }
}

impl<S> Limiter<S> {
    /// Decides by these, too.
    #[must_use]
    pub fn with_emergencies(mut self, emergencies: Arc<Emergencies>) -> Self {
        self.emergencies = emergencies;
        self
    }

    /// What bears on a request of what is on.
    #[inline]
    pub(crate) fn effect_of(&self, check: &Check<'_>) -> Option<Box<Effect>> {
        if !self.emergencies.are_on() {
            return None;
        }
        self.emergencies.effect(check, self.clock.now())
    }

    /// Whether nothing is denied at the moment, whatever it is.
    #[inline]
    pub(crate) fn denies_nothing(&self) -> bool {
        self.shadow.load(Ordering::Relaxed)
            || (self.emergencies.are_on() && self.emergencies.let_all(self.clock.now()))
    }
}

impl Emergencies {
    /// Whether everything passes, by either switch.
    #[cold]
    fn let_all(&self, now: Timestamp) -> bool {
        self.active.load().as_ref().is_some_and(|active| {
            active.all.iter().any(|one| matches!(one.act, Act::AllowAll | Act::ShadowAll) && now < one.until)
        })
    }
}
