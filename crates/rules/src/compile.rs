//! Rule compiler: turns drafts into rules and the tree that matches them.

mod inherit;
mod limits;
mod overload;
mod region;
mod store;

pub use self::store::{StoreNames, is_store_name};

use self::inherit::Inherited;
use crate::draft::{FileDraft, RuleDraft, ShapeDraft};
use crate::envoy_keys;
use crate::network;
use crate::overrides::CALLER_KEY;
use crate::pattern::Pattern;
use crate::reader::{Reader, Spanned};
use crate::region::RegionSetting;
use crate::rule::{
    Action, Billing, Class, CostFrom, Coupling, Enforce, FailPolicy, LimitSet, OnError, Profile, Rule,
    RuleLimit,
};
use crate::ruleset::{Domain, Options};
use crate::scope::ScopePath;
use crate::sensitivity::{identifies_caller, may_be_secret};
use crate::tree::{Element, GLOBAL, Level, TreeNode, ValueTest};
use crate::yaml::{Position, shorten};
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use tollgate_core::{Algorithm, Mode};

/// Positions in the file, for lints: one entry per node of the tree.
#[derive(Clone, Debug)]
pub(crate) struct NodeLocation {
    pub(crate) at: Position,
    /// Position of `soft`, if the rule has one.
    pub(crate) soft: Option<Position>,
    /// Position of `concurrency`, if the rule has one, and whether its `ttl` is written.
    pub(crate) concurrency: Option<(Position, bool)>,
    /// Positions of the default limits, in order.
    pub(crate) limits: Vec<Position>,
    /// Whether its rule has the algorithm of its group or of the file.
    pub(crate) inherits_algorithm: bool,
    /// Position of the `overload` section, at the root.
    pub(crate) overload: Option<Position>,
}

/// Compiles one file into a domain; its rules are appended to those of earlier files. Returns `None` if it has no name.
pub(crate) fn domain(
    reader: &mut Reader<'_>,
    file: FileDraft,
    options: &Options,
    rules: &mut Vec<Rule>,
) -> Option<(Domain, Vec<NodeLocation>)> {
    let name = file.domain?.value;
    let store = file.store.and_then(|given| store::resolve(reader, &given, options).ok().flatten());
    let root = TreeNode {
        element: Element { key: "".into(), test: ValueTest::Any },
        is_secret: false,
        shows_value: false,
        parent: 0,
        rule: None,
        children: Level::default(),
    };
    let mut compiler = Compiler {
        domain: name.clone(),
        reader,
        profile: options.profile.or(file.profile.map(|profile| profile.value)).unwrap_or_default(),
        shape: DefaultShape {
            algorithm: file.shape.algorithm.map(|algorithm| algorithm.value),
            jitter: file.shape.jitter.is_some_and(|jitter| jitter.value),
        },
        class: file.class.unwrap_or_default(),
        store: store.clone(),
        region: file.region,
        reported_stores: Vec::new(),
        options,
        billing: file.billing,
        durable: file.durable,
        shard_by: file.shard_by.as_ref().map(|attribute| attribute.value.clone()),
        rules,
        tree: vec![root],
        locations: vec![NodeLocation {
            at: file.shard_by.as_ref().map_or_else(Position::default, |attribute| attribute.at),
            soft: None,
            concurrency: None,
            limits: Vec::new(),
            inherits_algorithm: false,
            overload: file.overload.as_ref().map(|section| section.at),
        }],
    };
    compiler.native_only(&file.shape);
    if let Some(attribute) = &file.shard_by {
        compiler.reject_under_envoy(attribute.at, "`shard_by`");
    }
    let scope = ScopePath::domain(&name, options.readable_scopes);
    compiler.level(file.rules, 0, &scope, "", &Inherited::by_file(file.response));
    let overload = file.overload.map(|draft| Arc::new(compiler.overload(draft, &scope)));
    let Compiler {
        profile,
        class,
        shape: DefaultShape { algorithm, .. },
        shard_by,
        tree,
        locations: places,
        ..
    } = compiler;
    let domain = Domain {
        name,
        profile,
        coupling: coupling(profile, options),
        matching: file.matching,
        algorithm,
        class,
        scope,
        store,
        per_second_store: options.per_second_store.as_deref().map(Arc::from),
        tier_key: file.tier_key.filter(|key| !key.is_empty()).unwrap_or_else(|| "tier".to_owned()),
        shard_by,
        replaces: false,
        depends_on_tier: false,
        overload,
        tree,
        rules: Arc::new([]),
    };
    Some((domain, places))
}

/// Returns what a denial by one limit means for the others.
const fn coupling(profile: Profile, options: &Options) -> Coupling {
    match profile {
        Profile::Native => Coupling::AllOrNone,
        Profile::Envoy if options.stop_when_over => Coupling::AllOrNoneOfLive,
        Profile::Envoy => Coupling::Each,
    }
}

/// Adds the rules of another file of the same domain, whose own settings are those of the first file.
pub(crate) fn merge(
    reader: &mut Reader<'_>,
    file: FileDraft,
    options: &Options,
    rules: &mut Vec<Rule>,
    (domain, locations): (&mut Domain, &mut Vec<NodeLocation>),
) {
    let mut compiler = Compiler {
        domain: domain.name.clone(),
        reader,
        profile: domain.profile,
        shape: DefaultShape {
            algorithm: file.shape.algorithm.map(|algorithm| algorithm.value).or(domain.algorithm),
            jitter: file.shape.jitter.is_some_and(|jitter| jitter.value),
        },
        class: file.class.unwrap_or_default(),
        region: file.region,
        store: domain.store.clone(),
        reported_stores: Vec::new(),
        options,
        billing: file.billing,
        durable: file.durable,
        shard_by: domain.shard_by.clone(),
        rules,
        tree: std::mem::take(&mut domain.tree),
        locations: std::mem::take(locations),
    };
    compiler.native_only(&file.shape);
    let scope = domain.scope.clone();
    compiler.level(file.rules, 0, &scope, "", &Inherited::by_file(file.response));
    (domain.tree, *locations) = (compiler.tree, compiler.locations);
}

/// Arithmetic of limits for which neither they nor their rule set it.
#[derive(Clone, Copy)]
struct DefaultShape {
    /// `None` leaves it to the rule's class.
    algorithm: Option<Algorithm>,
    jitter: bool,
}

struct Compiler<'c, 's> {
    domain: String,
    reader: &'c mut Reader<'s>,
    profile: Profile,
    shape: DefaultShape,
    class: Class,
    /// Store of rules that name none.
    store: Option<Arc<str>>,
    /// How cells share the limits of rules that do not say.
    region: Option<Spanned<RegionSetting>>,
    /// Positions of names that have been reported.
    reported_stores: Vec<Position>,
    options: &'c Options,
    billing: bool,
    durable: Option<bool>,
    shard_by: Option<String>,
    rules: &'c mut Vec<Rule>,
    tree: Vec<TreeNode>,
    locations: Vec<NodeLocation>,
}

impl Compiler<'_, '_> {
    fn level(
        &mut self,
        drafts: Vec<RuleDraft>,
        parent: u32,
        scope: &ScopePath,
        path: &str,
        inherited: &Inherited,
    ) {
        let twice = self.duplicates(&drafts, parent);
        for (mut draft, twice) in drafts.into_iter().zip(twice) {
            let Some(key) = draft.key.take() else { continue };
            if twice {
                continue;
            }
            let Some(element) = self.element(&key, &draft) else { continue };
            // Of another file of the same domain.
            if self.tree[parent as usize].children.contains(&element) {
                let message =
                    format!("duplicate descriptor `{}` at one level", shorten(&named(&key, &draft)));
                self.reader.error_help(key.at, message, "another file of this domain has it; merge them");
                let reason = self.duplicate_key(parent, &key.value, &draft);
                self.reader.errors.envoy_reason(reason);
                continue;
            }
            self.node(draft, element, parent, (scope, path), inherited);
        }
    }

    /// Returns which descriptors of one level repeat an earlier one, and reports each.
    fn duplicates(&mut self, drafts: &[RuleDraft], parent: u32) -> Vec<bool> {
        let mut seen: HashMap<(&str, Option<&str>), Position, foldhash::fast::RandomState> =
            HashMap::default();
        let mut twice = vec![false; drafts.len()];
        for (draft, twice) in drafts.iter().zip(&mut twice) {
            let Some(key) = &draft.key else { continue };
            let identity = (key.value.as_str(), draft.value.as_ref().map(|value| value.value.as_str()));
            if let Some(first) = seen.insert(identity, draft.at) {
                *twice = true;
                let message = format!("duplicate descriptor `{}` at one level", shorten(&named(key, draft)));
                let help = format!("the first is on line {}; merge them", first.line);
                self.reader.error_help(key.at, message, help);
                let reason = self.duplicate_key(parent, &key.value, draft);
                self.reader.errors.envoy_reason(reason);
            }
        }
        twice
    }

    /// Returns what envoyproxy/ratelimit says of a descriptor that its level has already.
    fn duplicate_key(&self, parent: u32, key: &str, draft: &RuleDraft) -> String {
        let mut path = envoy_keys::path(&self.domain, &self.tree, parent);
        path.push('.');
        path.push_str(key);
        if let Some(value) = draft.value.as_ref().filter(|value| !value.value.is_empty()) {
            path.push('_');
            path.push_str(&value.value);
        }
        format!("duplicate descriptor composite key '{}'", shorten(&path))
    }

    fn element(&mut self, key: &Spanned<String>, draft: &RuleDraft) -> Option<Element> {
        let shared = draft.share_threshold.filter(|shared| shared.value);
        let pattern = draft.value.as_ref().and_then(|value| Pattern::new(&value.value));
        if let (Some(shared), None) = (shared, &pattern) {
            self.reader.error_help(
                shared.at,
                "`share_threshold` without a wildcard",
                "it makes one counter for all values of a pattern: write one as in `value: \"GET *\"`, or leave it out",
            );
            let key = format!(
                "{}{}",
                key.value,
                draft.value.as_ref().map_or_else(String::new, |value| format!("_{}", value.value))
            );
            self.reader.errors.envoy_reason(format!(
                "share_threshold can only be used with wildcard values (ending with '*'), but found key '{}'",
                shorten(&key)
            ));
        }
        // In files for envoyproxy/ratelimit a key is a name, whatever it ends in and by whichever arithmetic its limits count.
        let network = match self.reader.is_ratelimit_file {
            true => None,
            false => match network::split(&key.value) {
                Ok(network) => network,
                Err(why) => {
                    self.reader.error_help(key.at, why, "write it as in `remote_address/24/64`");
                    return None;
                }
            },
        };
        if let (Some(_), Some(value)) = (network, &draft.value) {
            self.reader.error_help(
                value.at,
                "a key with a prefix takes no `value`",
                "leave it out: each network has a counter of its own",
            );
            return None;
        }
        let test = match (network, pattern, &draft.value) {
            (Some((name, prefix)), ..) => {
                return Some(Element { key: name.into(), test: ValueTest::Network(prefix) });
            }
            (_, Some(pattern), _) if shared.is_some() => ValueTest::Shared(pattern),
            (_, Some(pattern), _) => ValueTest::Like(pattern),
            (_, None, Some(value)) => ValueTest::Exact(value.value.as_str().into()),
            (_, None, None) => ValueTest::Any,
        };
        Some(Element { key: key.value.as_str().into(), test })
    }

    fn node(
        &mut self,
        mut draft: RuleDraft,
        element: Element,
        parent: u32,
        (scope, path): (&ScopePath, &str),
        inherited: &Inherited,
    ) {
        let Ok(id) = u32::try_from(self.tree.len()) else { return };
        let scope = scope.child(&element);
        let path = if path.is_empty() { element.to_string() } else { format!("{path}/{element}") };
        self.tree[parent as usize].children.insert(&element, id);
        inherited.complete(&mut draft);
        let is_group = draft.is_group();
        let children = std::mem::take(&mut draft.rules);
        self.locations.push(NodeLocation {
            at: draft.at,
            soft: draft.soft.map(|soft| soft.at),
            concurrency: draft.concurrency.map(|held| (held.at, held.value.has_ttl)),
            limits: Vec::new(),
            inherits_algorithm: false,
            overload: None,
        });
        let is_secret = may_be_secret(&element.key);
        self.tree.push(TreeNode {
            element,
            is_secret,
            shows_value: draft.value_to_metric,
            parent,
            rule: None,
            children: Level::default(),
        });
        if is_group {
            let group = self.group(draft, inherited);
            self.level(children, id, &scope, &path, &group);
        } else {
            self.tree[id as usize].rule = self.rule(draft, &scope, &path, inherited);
            self.level(children, id, &scope, &path, inherited);
        }
    }

    /// Returns the rule of a descriptor that is not a group.
    fn rule(
        &mut self,
        mut draft: RuleDraft,
        scope: &ScopePath,
        path: &str,
        inherited: &Inherited,
    ) -> Option<u32> {
        self.native_only(&draft.shape);
        let store = self.store_of(&draft);
        if draft.region.is_none() {
            draft.region.clone_from(&self.region);
        }
        let region = self.region_of(&draft);
        let tier_stores = self.tier_stores_of(&draft);
        let stored = |store: Option<&str>| {
            let stored = scope.in_region(region.as_deref()).in_store(store);
            draft.split.map_or(stored.clone(), |split| stored.split(split.value))
        };
        let own = stored(store.as_deref());
        let of_tiers: Vec<(&str, ScopePath)> =
            tier_stores.iter().map(|(tier, store)| (tier.as_str(), stored(store.as_deref()))).collect();
        let defaults = self.shape;
        self.shape.algorithm = inherited.algorithm().or(defaults.algorithm);
        self.shape.jitter = inherited.jitter().unwrap_or(defaults.jitter);
        let (limits, tiers, unnamed_tiers) = self.limit_sets(&draft, &own, &of_tiers);
        let has_algorithm_of_class = self.shape.algorithm.is_none() && draft.shape.algorithm.is_none();
        if let Some(place) = self.locations.last_mut() {
            place.inherits_algorithm = !has_algorithm_of_class && draft.shape.algorithm.is_none();
        }
        self.shape = defaults;
        self.reject_unleasable(&draft, &limits);
        let id = u32::try_from(self.rules.len()).ok()?;
        let enforce = self.enforce(&draft, scope);
        let shard_by = self.shard_by.clone().filter(|attribute| self.is_sharded(attribute));
        let class = draft.class.unwrap_or(self.class);
        let billing = self.billing(&draft);
        let is_stated = draft.on_error.is_some();
        let mut on_error = match (draft.on_error, draft.fallback) {
            (Some(on_error), _) => on_error.complete(class),
            (None, Some(_)) => OnError::Always(FailPolicy::Local),
            (None, None) => by_class(class),
        };
        if !tiers.is_empty() {
            // A caller that leaves its tier out must not fare better in an outage than with the tier whose limit it has.
            let of_class = (class == Class::Cost && !is_stated).then_some(FailPolicy::Closed);
            let own = unnamed_tiers.iter().map(|tier| on_error.policy(Some(tier)));
            let least = own.chain(of_class).fold(FailPolicy::Open, FailPolicy::stricter);
            on_error = on_error.protect_unnamed(tiers.iter().map(|(tier, _)| tier.as_str()), least);
        }
        let rule = Rule {
            id,
            is_plain: false,
            enforcement: Default::default(),
            is_shedding: false,
            has_explicit_name: draft.name.is_some(),
            has_algorithm_of_class,
            keys: self.keys_of_last_node(),
            name: draft.name.map_or_else(|| path.to_owned(), |name| name.value),
            limits,
            tiers,
            unnamed_tiers,
            class,
            on_error,
            action: draft.action.map_or(Action::Reject, |action| action.value),
            mode: draft.mode.map_or(Mode::Adaptive, |mode| mode.value),
            store,
            tier_stores,
            region,
            homes: None,
            has_empty_part: false,
            shared_by_callers: scope.is_shared()
                && shard_by.as_ref().is_none_or(|attribute| !identifies_caller(attribute)),
            shard_by,
            fallback: draft.fallback.map(|part| part.value),
            split: draft.split.map(|split| u16::try_from(split.value).unwrap_or(u16::MAX)),
            priority: draft.priority.unwrap_or(0),
            enforce,
            cost: draft.cost.map_or(CostFrom::Request, Into::into),
            billing,
            durable: draft.durable.map(|durable| durable.value).or(self.durable),
            replaces: draft.replaces.into_iter().map(|name| name.value).collect(),
            detailed_metric: draft.detailed_metric,
            value_to_metric: draft.value_to_metric,
            metadata: draft.metadata,
            response: Some(draft.response).filter(|response| !response.is_empty()).map(Box::new),
            location: (self.reader.source.name.clone(), draft.at.line),
        };
        self.rules.push(rule.prepared(coupling(self.profile, self.options)));
        Some(id)
    }

    /// Returns the gradual enforcement of the newest descriptor's rule; `None` if it is enforced for all.
    fn enforce(&mut self, draft: &RuleDraft, scope: &ScopePath) -> Option<Enforce> {
        let share = draft.enforce?;
        if draft.shadow.is_some_and(|shadow| shadow.value) {
            self.reader.error_help(
                share.at,
                "`enforce` beside `shadow: true`: a rule in shadow denies nobody",
                "keep one of them",
            );
            return None;
        }
        // Of several values, the one that identifies the caller: a caller is in for all its endpoints, or for none.
        let keys = self.counted_keys();
        if keys.is_empty() || keys == [GLOBAL.0] {
            self.reader.error_help(
                share.at,
                "`enforce` on a rule that counts all callers together: there are no callers to choose from",
                "write it on a rule with a counter for each caller, such as `key: api_key`",
            );
            return None;
        }
        let part = keys.iter().position(|key| identifies_caller(key)).unwrap_or(0);
        (share.value < Enforce::ALL).then(|| Enforce {
            thousandths: share.value,
            part,
            key: scope.stable_hash(),
        })
    }

    /// Returns the keys on the path to the newest descriptor whose values have counters of their own.
    fn counted_keys(&self) -> Vec<&str> {
        let (mut keys, mut at) = (Vec::new(), self.tree.len() - 1);
        while at != 0 {
            let TreeNode { element, parent, .. } = &self.tree[at];
            if !matches!(element.test, ValueTest::Exact(_) | ValueTest::Shared(_)) {
                keys.push(&*element.key);
            }
            at = *parent as usize;
        }
        keys.reverse();
        keys
    }

    /// Returns how the newest descriptor's rule is billed; `None` if it is not.
    fn billing(&self, draft: &RuleDraft) -> Option<Billing> {
        if !draft.billing.map_or(self.billing, |billing| billing.value) {
            return None;
        }
        let keys = self.counted_keys();
        let caller = keys.iter().find(|key| **key == CALLER_KEY);
        let caller = caller.or_else(|| keys.iter().find(|key| **key != GLOBAL.0 && identifies_caller(key)));
        Some(Billing { caller_key: caller.map(|key| (*key).into()) })
    }

    /// Returns whether the counters of the newest descriptor get the domain's `shard_by` value in front: not if they have
    /// it there already, and not if the path says that all callers share them.
    fn is_sharded(&self, attribute: &str) -> bool {
        let mut at = self.tree.len() - 1;
        let mut first = None;
        while at != 0 {
            let TreeNode { element, parent, .. } = &self.tree[at];
            let is_shared = matches!(element.test, ValueTest::Shared(_)) && *element.key == *attribute;
            if *element.key == *GLOBAL.0 || is_shared {
                return false;
            }
            if !matches!(element.test, ValueTest::Exact(_) | ValueTest::Shared(_)) {
                first = Some(element);
            }
            at = *parent as usize;
        }
        let has_it =
            |element: &Element| *element.key == *attribute && !matches!(element.test, ValueTest::Network(_));
        !first.is_some_and(has_it)
    }

    /// Returns the keys on the path to the node that was added last.
    fn keys_of_last_node(&self) -> Vec<Box<str>> {
        let mut keys = Vec::new();
        let mut at = self.tree.len() - 1;
        while at != 0 {
            keys.push(self.tree[at].element.key.clone());
            at = self.tree[at].parent as usize;
        }
        keys.reverse();
        keys
    }

    /// Rejects `mode: leased` on limits whose units cannot be taken ahead.
    fn reject_unleasable(&mut self, draft: &RuleDraft, limits: &LimitSet) {
        let Some(mode) = draft.mode.filter(|mode| mode.value == Mode::Leased) else { return };
        let held = |limit: &&RuleLimit| limit.limit.algorithm() != Algorithm::Concurrency;
        let other = limits.limits.iter().filter(held).find(|limit| !limit.limit.is_leasable());
        if let Some(limit) = other.filter(|limit| limit.limit.refill_interval().is_some()) {
            self.reader.error_help(
                mode.at,
                format!(
                    "{} with `refill_interval` cannot be leased: its units come back together",
                    limit.limit.algorithm()
                ),
                "write `mode: central`, or leave `refill_interval` out",
            );
        } else if let Some(limit) = other {
            self.reader.error_help(
                mode.at,
                format!(
                    "{} cannot be leased: what it counts is when each unit is used",
                    limit.limit.algorithm()
                ),
                "write `mode: central`, or use gcra, token_bucket or a window",
            );
        }
    }

    /// Rejects, under `profile: envoy`, what would change that service's arithmetic.
    fn native_only(&mut self, shape: &ShapeDraft) {
        let ShapeDraft { algorithm, burst, slots, jitter, refill_interval } = shape;
        let places = [
            ("algorithm", algorithm.map(|placed| placed.at)),
            ("burst", burst.map(|placed| placed.at)),
            ("slots", slots.map(|placed| placed.at)),
            ("jitter", jitter.map(|placed| placed.at)),
            ("refill_interval", refill_interval.map(|placed| placed.at)),
        ];
        for (name, at) in places {
            if let Some(at) = at {
                self.reject_under_envoy(at, &format!("`{name}`"));
            }
        }
    }

    fn reject_under_envoy(&mut self, at: Position, what: &str) {
        if self.profile == Profile::Envoy {
            self.reader.error_help(
                at,
                format!(
                    "{what} would change the arithmetic of `profile: envoy`, which is fixed windows alone"
                ),
                "leave it out, or leave the profile out",
            );
        }
    }
}

fn named(key: &Spanned<String>, draft: &RuleDraft) -> String {
    match &draft.value {
        Some(value) => format!("{}={}", key.value, value.value),
        None => key.value.clone(),
    }
}

fn by_class(class: Class) -> OnError {
    match class {
        Class::Comfort => OnError::Always(FailPolicy::Local),
        Class::Security | Class::Strict => OnError::Always(FailPolicy::Closed),
        Class::Cost => OnError::ByTier {
            tiers: BTreeMap::from([("free".to_owned(), FailPolicy::Closed)]),
            otherwise: FailPolicy::Open,
        },
    }
}

/// The default limits, the limits by tier, and the tiers that the default limits are of.
type LimitSets = (LimitSet, Vec<(String, LimitSet)>, Vec<String>);
