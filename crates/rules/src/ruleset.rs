//! Rule set: the rules of all domains, loaded together and immutable afterwards.

use crate::compile::{self, StoreNames};
use crate::decode;
use crate::diagnostic::{Diagnostic, Diagnostics, Severity};
use crate::draft::FileDraft;
use crate::lint;
use crate::overload::{AttributeValue, Overload};
use crate::placement;
use crate::quota_key::QuotaKeys;
use crate::reader::Reader;
use crate::region::{CellPlace, RegionSetting};
use crate::required_domains::RequiredDomains;
use crate::rule::{Class, CostFrom, Coupling, DescriptorMatch, Profile, Rule, RuleLimit};
use crate::scope::ScopePath;
use crate::sensitivity::identifies_caller;
use crate::suggest::is_one_edit;
use crate::tree::{TreeNode, ValueTest};
use crate::yaml::{Position, shorten};
use std::collections::HashMap;
use std::sync::Arc;
use tollgate_core::{Algorithm, CounterOwner, Mode, StableHasher, is_same_name};

/// A rule file: its name for diagnostics, and its text.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Source {
    /// Name of the file.
    pub name: String,
    /// Text of the file.
    pub text: String,
}

impl Source {
    /// Creates a file with this name and text.
    #[must_use]
    pub fn new(name: impl Into<String>, text: impl Into<String>) -> Self {
        Self { name: name.into(), text: text.into() }
    }
}

/// Load options.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Options {
    /// Profile for every domain, overriding the files.
    pub profile: Option<Profile>,
    /// Number of nodes that share the limits, if known: determines what each may allow alone while the store is
    /// unavailable.
    pub nodes: Option<u32>,
    /// Whether limits that all callers share are leased when their rules have no `mode`, because the store is remote.
    pub lease_shared: bool,
    /// Whether the store is a Redis Cluster, where counters lie in slots, if that is known. Only lints use it.
    pub cluster: Option<bool>,
    /// What happens to concurrency permits when a request ends. Only lints use it.
    pub permits: PermitRelease,
    /// Attributes whose values any client can invent, if the server is known. Only lints use it.
    pub unverified: Option<Vec<String>>,
    /// Names of the stores that rules may name; any, if they are not known because the file is read alone.
    pub stores: Option<StoreNames>,
    /// Whether several files may have the same domain, whose rules are then joined; otherwise that is an error.
    pub merge_domains: bool,
    /// Whether the files were written for envoyproxy/ratelimit, whatever their profile: that service ignores its own keys
    /// where they mean nothing, and so they are warnings there instead of errors; and a key that ends in `/24` is a name there, not a
    /// network. Files of `profile: envoy` always are.
    pub ratelimit_files: bool,
    /// Whether every limit has `quota_mode`.
    pub quota_mode: bool,
    /// Whether a request that one limit denies charges none of its others under `profile: envoy` too.
    pub stop_when_over: bool,
    /// Store of limits per second whose rules name none.
    pub per_second_store: Option<String>,
    /// Whether the names of counters contain values that may be secrets as they are: for keys that another program
    /// writes so too.
    pub readable_scopes: bool,
    /// The cells that share limits, and this server's place among them; `None` if that is not known because the file is
    /// read alone.
    pub cells: Option<CellPlace>,
    /// Domains without which rules are refused.
    pub required_domains: RequiredDomains,
}

/// What happens to concurrency permits when a request ends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum PermitRelease {
    /// Not known: the file is read alone.
    #[default]
    Unknown,
    /// Released: the gateway or a Rust layer sees the end.
    Released,
    /// They expire: no protocol that is served reports the end.
    Expire,
}

/// All rules, compiled.
///
/// ```
/// use tollgate_core::Cost;
/// use tollgate_rules::{Options, Ruleset, Source};
/// let file = Source::new("api.yaml", "{domain: api, descriptors: [{key: user, limit: 100/minute}]}");
/// let rules = Ruleset::load(&[file], &Options::default())?;
/// let request = [("user", "alice"), ("path", "/")];
/// let plan = rules.domain("api").unwrap().plan(&request, Cost::ONE);
/// assert_eq!(plan.limits[0].limit.limit.to_string(), "gcra 100/1m");
/// # Ok::<(), tollgate_rules::Diagnostics>(())
/// ```
#[derive(Clone, Debug)]
pub struct Ruleset {
    domains: Vec<Domain>,
    by_name: HashMap<String, usize, foldhash::fast::RandomState>,
    rules: Arc<[Rule]>,
    /// Location of each limit by number: its rule, and its index among that rule's limits.
    limits: Vec<(u32, u32)>,
    warnings: Vec<Diagnostic>,
    notes: Vec<Diagnostic>,
    sources: Vec<Source>,
    revision: String,
    /// Whether any rule is billed.
    has_billing: bool,
    /// Number of nodes that share the limits, if known.
    pub(crate) nodes: Option<u32>,
    /// The cells that share the limits.
    pub(crate) cells: Option<CellPlace>,
    /// The attributes that quotas can be about; computed on first use.
    pub(crate) quota_keys: std::sync::OnceLock<QuotaKeys>,
}

/// The rules of one domain.
#[derive(Clone, Debug)]
pub struct Domain {
    pub(crate) name: String,
    pub(crate) profile: Profile,
    pub(crate) coupling: Coupling,
    /// Which rules descriptors match.
    pub(crate) matching: DescriptorMatch,
    /// Algorithm of limits that specify none, and of inline limits; by their class if the file has none.
    pub(crate) algorithm: Option<Algorithm>,
    /// Class of rules that specify none.
    pub(crate) class: Class,
    pub(crate) scope: ScopePath,
    /// Attribute that contains a caller's tier.
    pub(crate) tier_key: String,
    /// Attribute whose value places a request's counters.
    pub(crate) shard_by: Option<String>,
    /// Store of rules that name none, and of inline limits; `None` for the default store.
    pub(crate) store: Option<Arc<str>>,
    /// Store of inline limits per second; `None` for that of all others.
    pub(crate) per_second_store: Option<Arc<str>>,
    /// Whether any rule replaces others.
    pub(crate) replaces: bool,
    /// Whether any rule depends on a caller's tier.
    pub(crate) depends_on_tier: bool,
    /// What is shed when not all can be served.
    pub(crate) overload: Option<Arc<Overload>>,
    /// Tree nodes: the root first, then every descriptor in the order of the file.
    pub(crate) tree: Vec<TreeNode>,
    /// Rules of all domains; the tree refers to those of this one.
    pub(crate) rules: Arc<[Rule]>,
}

impl Ruleset {
    /// Parses, validates and compiles rule files.
    ///
    /// # Errors
    /// All errors in any of the files.
    pub fn load(sources: &[Source], options: &Options) -> Result<Self, Diagnostics> {
        let mut errors = Diagnostics::default();
        let mut warnings = Vec::new();
        let mut rules = Vec::new();
        let mut compiled: Vec<(Domain, Vec<compile::NodeLocation>, &Source)> = Vec::new();
        let mut by_name = HashMap::default();
        let mut merged = Vec::new();
        for source in sources {
            let mut reader = Reader {
                is_ratelimit_file: options.ratelimit_files || options.profile == Some(Profile::Envoy),
                ..Reader::new(source, &mut errors, &mut warnings)
            };
            let Some(mut file) = decode::file(&mut reader) else { continue };
            let name = file.domain.as_ref().map(|domain| domain.value.as_str());
            if let (true, Some(first)) = (options.merge_domains, name.and_then(|name| by_name.get(name))) {
                let (domain, places, _): &mut (Domain, Vec<compile::NodeLocation>, &Source) =
                    &mut compiled[*first];
                compile::merge(&mut reader, file, options, &mut rules, (domain, places));
                merged.push(*first);
                continue;
            }
            reject_duplicate_domain(&mut reader, &mut file, &by_name, &compiled);
            if let Some((domain, places)) = compile::domain(&mut reader, file, options, &mut rules) {
                by_name.insert(domain.name.clone(), compiled.len());
                compiled.push((domain, places, source));
            }
        }
        for (user, domain) in options.required_domains.missing(|domain| by_name.contains_key(domain)) {
            errors.push(|| missing_domain(sources, &user, &domain));
        }
        if !errors.is_empty() {
            return Err(errors);
        }
        placement::resolve_modes(&mut rules, options);
        let limits = assign_ids(&mut rules);
        let has_billing = rules.iter().any(|rule| rule.billing.is_some());
        let rules: Arc<[Rule]> = rules.into();
        let mut domains = Vec::with_capacity(compiled.len());
        for (at, (mut domain, places, source)) in compiled.into_iter().enumerate() {
            domain.rules = Arc::clone(&rules);
            let replaces = domain.domain_rules().any(|rule| !rule.replaces.is_empty());
            domain.replaces = replaces;
            let asks_tier = domain.domain_rules().any(Rule::depends_on_tier);
            domain.depends_on_tier = asks_tier;
            // The places of a joined domain are in several files, so that no warning could name its line.
            if !merged.contains(&at) {
                let mut reader = Reader {
                    is_ratelimit_file: options.ratelimit_files || domain.profile == Profile::Envoy,
                    ..Reader::new(source, &mut errors, &mut warnings)
                };
                lint::domain(&domain, &places, options, &mut reader);
            }
            domains.push(domain);
        }
        let (notes, warnings) =
            warnings.into_iter().partition(|found: &Diagnostic| found.severity == Severity::Note);
        Ok(Self {
            domains,
            by_name,
            rules,
            limits,
            warnings,
            notes,
            sources: sources.to_vec(),
            revision: revision(sources, options),
            has_billing,
            nodes: options.nodes,
            cells: options.cells.clone(),
            quota_keys: std::sync::OnceLock::new(),
        })
    }

    /// Returns the files that the rule set was compiled from.
    #[must_use]
    pub fn sources(&self) -> &[Source] {
        &self.sources
    }

    /// Returns the warnings: rules that load but have no effect.
    #[must_use]
    pub fn warnings(&self) -> &[Diagnostic] {
        &self.warnings
    }

    /// Returns what would be warnings for some stores, if [`Options`] do not name the one in use.
    #[must_use]
    pub fn notes(&self) -> &[Diagnostic] {
        &self.notes
    }

    /// Returns the rules hash: twelve hexadecimal digits that are the same wherever the same rules are loaded.
    #[must_use]
    pub fn revision(&self) -> &str {
        &self.revision
    }

    /// Returns all domains, in the order of the files.
    pub fn domains(&self) -> impl Iterator<Item = &Domain> {
        self.domains.iter()
    }

    /// Returns the domain with this name.
    #[must_use]
    #[inline]
    pub fn domain(&self, name: &str) -> Option<&Domain> {
        match &self.domains[..] {
            [only] => is_same_name(&only.name, name).then_some(only),
            _ => self.domain_number(name).map(|number| &self.domains[number]),
        }
    }

    /// Returns the domain that a name without rules is probably meant as: one that differs in one letter, or in case.
    ///
    /// ```
    /// # use tollgate_rules::{Options, Ruleset, Source};
    /// let rules = Ruleset::load(&[Source::new("shop.yaml", "domain: shop")], &Options::default()).unwrap();
    /// assert_eq!(rules.similar_domain("Shpo"), Some("shop"));
    /// assert_eq!(rules.similar_domain("store"), None);
    /// ```
    #[must_use]
    pub fn similar_domain(&self, name: &str) -> Option<&str> {
        /// Requests choose the name, so that what is compared is bounded.
        const MAX_COMPARED: usize = 200;
        let is_short = (3..=128).contains(&name.len());
        let mut known = self.domains.iter().take(MAX_COMPARED).map(|domain| domain.name.as_str());
        known.find(|known| is_short && is_one_edit(name, known))
    }

    /// Returns the number of the domain with this name.
    #[inline(never)]
    pub(crate) fn domain_number(&self, name: &str) -> Option<usize> {
        self.by_name.get(name).copied()
    }

    /// Returns all rules, in the order of the files; a rule's index is its ID.
    #[must_use]
    pub fn rules(&self) -> &[Rule] {
        &self.rules
    }

    /// Returns the number of rules that files have, for reports: without the one by which tenants share the fleet's capacity,
    /// which nobody has written.
    #[must_use]
    pub fn rule_count(&self) -> usize {
        self.domains.iter().map(|domain| domain.domain_rules().count()).sum()
    }

    /// Returns whether consumption may be written to the database: a rule that does not say is durable for callers whose quota
    /// is of a calendar month, and grants are for everyone.
    #[must_use]
    pub fn may_be_durable(&self) -> bool {
        self.rules().iter().any(|rule| rule.durable != Some(false) && rule.mode != Mode::Local)
    }

    /// Returns the name of a rule that says `durable: true`, if there is one.
    #[must_use]
    pub fn durable_rule(&self) -> Option<&str> {
        self.rules().iter().find(|rule| rule.durable == Some(true)).map(|rule| rule.name.as_str())
    }

    /// Returns whether the consumption of any rule is recorded for billing.
    #[must_use]
    #[inline]
    pub const fn has_billing(&self) -> bool {
        self.has_billing
    }

    /// Returns the limit with this number.
    #[must_use]
    pub fn limit(&self, id: u32) -> Option<&RuleLimit> {
        let (rule, place) = *self.limits.get(id as usize)?;
        self.rule(rule)?.all_limits().nth(place as usize)
    }

    /// Returns the rule with this ID.
    #[must_use]
    pub fn rule(&self, id: u32) -> Option<&Rule> {
        self.rules.get(id as usize)
    }

    /// Returns which cell decides grants of these rules: the owner of their counters, if they have one; `None` if grants
    /// are shared. A grant has no home, so a hash selects the owner in its place, where all cells are known.
    #[must_use]
    pub fn grant_owner(&self, rules: &[u32]) -> Option<CounterOwner<'_>> {
        let is_learned = self.cells.as_ref().is_some_and(|cells| cells.learned.is_some());
        let regions = rules.iter().filter_map(|id| self.rule(*id)?.region.as_deref());
        match regions.filter(|region| region.mode.has_owner()).map(RegionSetting::counter_owner).next()? {
            CounterOwner::Home => (!is_learned).then_some(CounterOwner::Hash),
            owner => Some(owner),
        }
    }
}

impl Domain {
    /// Returns the domain's name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the profile: the arithmetic of its decisions.
    #[must_use]
    pub const fn profile(&self) -> Profile {
        self.profile
    }

    /// Returns which rules descriptors match.
    #[must_use]
    pub const fn matching(&self) -> DescriptorMatch {
        self.matching
    }

    /// Returns the attribute that contains a caller's tier.
    #[must_use]
    pub fn tier_key(&self) -> &str {
        &self.tier_key
    }

    /// Returns whether any rule depends on a caller's tier.
    #[must_use]
    pub const fn depends_on_tier(&self) -> bool {
        self.depends_on_tier
    }

    /// Returns the attribute whose value places a request's counters together.
    #[must_use]
    pub fn shard_by(&self) -> Option<&str> {
        self.shard_by.as_deref()
    }

    /// Returns what is shed when not all can be served.
    #[must_use]
    #[inline]
    pub const fn overload(&self) -> Option<&Arc<Overload>> {
        self.overload.as_ref()
    }

    /// Returns the endpoints that its rules and priorities name: `POST /login`, `GET /users/{id}`, and patterns such as
    /// `GET /api/*`. Who identifies requests resolves paths to them.
    pub fn endpoints(&self) -> impl Iterator<Item = &str> {
        const KEY: &str = "endpoint";
        let in_rules =
            self.tree.iter().filter(|node| *node.element.key == *KEY).filter_map(|node| {
                match &node.element.test {
                    ValueTest::Exact(value) => Some(&**value),
                    ValueTest::Like(pattern) | ValueTest::Shared(pattern) => Some(pattern.text()),
                    ValueTest::Any | ValueTest::Network(_) => None,
                }
            });
        let in_priorities = self.overload.iter().flat_map(|overload| overload.values(KEY));
        in_rules.chain(in_priorities.map(AttributeValue::text))
    }

    /// Returns everything that a value must equal for some rule to match: literal values in its rules, and their tiers.
    pub fn literal_values(&self) -> impl Iterator<Item = &str> {
        let named = self.tree.iter().filter_map(|node| match &node.element.test {
            ValueTest::Exact(value) => Some(&**value),
            _ => None,
        });
        named.chain(self.domain_rules().flat_map(|rule| rule.tiers.iter().map(|(tier, _)| tier.as_str())))
    }

    /// Returns what its rules take from attributes as the cost of requests: the rule, and the attribute.
    pub fn cost_attributes(&self) -> impl Iterator<Item = (&Rule, &str)> {
        self.domain_rules().flat_map(|rule| {
            let names = rule.all_limits().filter_map(|limit| match limit.cost_from(rule) {
                CostFrom::Attribute(name) => Some(name.as_str()),
                CostFrom::Request | CostFrom::Fixed(_) => None,
            });
            names.collect::<std::collections::BTreeSet<_>>().into_iter().map(move |name| (rule, name))
        })
    }

    /// Returns the wildcards in its rules for values that identify a caller.
    pub fn wildcards(&self) -> impl Iterator<Item = &str> {
        self.tree.iter().filter(|node| identifies_caller(&node.element.key)).filter_map(|node| {
            match &node.element.test {
                ValueTest::Like(pattern) | ValueTest::Shared(pattern) if !pattern.matches_all() => {
                    Some(pattern.text())
                }
                _ => None,
            }
        })
    }

    /// Returns the domain's rules, in the order of the file.
    pub fn domain_rules(&self) -> impl Iterator<Item = &Rule> {
        let overload = self.overload.as_deref();
        let fleet = overload.and_then(|overload| overload.fleet.as_ref()).map(|fleet| fleet.rule);
        let workers = overload.and_then(|overload| overload.workers.as_ref()).map(|workers| workers.rule);
        let tree = self.tree.iter().filter_map(|node| node.rule);
        tree.chain(workers).chain(fleet).map(|id| &self.rules[id as usize])
    }
}

/// Numbers all limits. Returns the location of each.
fn assign_ids(rules: &mut [Rule]) -> Vec<(u32, u32)> {
    let mut places = Vec::new();
    for rule in rules {
        let sets = std::iter::once(&mut rule.limits).chain(rule.tiers.iter_mut().map(|(_, set)| set));
        for (place, limit) in (0..).zip(sets.flat_map(|set| &mut set.limits)) {
            limit.id = u32::try_from(places.len()).unwrap_or(u32::MAX);
            places.push((rule.id, place));
        }
    }
    places
}

/// Rejects two files with one domain: they would share each other's counters.
fn reject_duplicate_domain(
    reader: &mut Reader<'_>,
    file: &mut FileDraft,
    by_name: &HashMap<String, usize, foldhash::fast::RandomState>,
    compiled: &[(Domain, Vec<compile::NodeLocation>, &Source)],
) {
    let Some(domain) = &file.domain else { return };
    let Some(first) = by_name.get(&domain.value) else { return };
    reader.error_help(
        domain.at,
        format!("duplicate domain `{}`", shorten(&domain.value)),
        format!("`{}` has it already; put the rules of one domain into one file", compiled[*first].2.name),
    );
    let first = &compiled[*first].2.name;
    let reason =
        format!("duplicate domain '{}' in config file; {first} has it already", shorten(&domain.value));
    reader.errors.envoy_reason(reason);
    // The rest of the file is still checked, under an invalid name.
    file.domain.as_mut().into_iter().for_each(|domain| domain.value.push('\0'));
}

/// Rejects rules without a domain that this process decides by.
fn missing_domain(sources: &[Source], user: &str, domain: &str) -> Diagnostic {
    let none = Source::new("rules", "");
    let at = Position { line: 1, column: 1, width: 0 };
    let message = format!("the domain `{}` is missing, and {user} decides by it", shorten(domain));
    Diagnostic::new(Severity::Error, sources.first().unwrap_or(&none), at, message).help(
        "its requests would have no limits; keep a rule file of this domain, or change first what decides by it",
    )
}

/// Hashes the contents of the files, independent of their paths and order.
fn revision(sources: &[Source], options: &Options) -> String {
    let mut hashes: Vec<u64> = sources
        .iter()
        .map(|source| {
            let mut hasher = StableHasher::default();
            hasher.bytes(source.text.as_bytes());
            hasher.finish()
        })
        .collect();
    hashes.sort_unstable();
    let mut hasher = StableHasher::default();
    hasher.number(match options.profile {
        None => 0,
        Some(Profile::Native) => 1,
        Some(Profile::Envoy) => 2,
    });
    hashes.into_iter().for_each(|hash| hasher.number(hash));
    format!("{:012x}", hasher.finish() >> 16)
}
