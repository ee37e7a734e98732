//! Rule set: the rules of all domains, loaded together and then only read.

use crate::compile;
use crate::decode;
use crate::diagnostic::{Diagnostic, Diagnostics};
use crate::draft::FileDraft;
use crate::lint;
use crate::overrides::Overridable;
use crate::placement;
use crate::reader::Reader;
use crate::rule::{Profile, Rule, RuleLimit};
use crate::scope::ScopePath;
use crate::sensitivity::identifies_caller;
use crate::tree::{TreeNode, ValueTest};
use crate::yaml::shorten;
use std::collections::HashMap;
use std::sync::Arc;
use tollgate_core::{Algorithm, StableHasher};

/// A rule file: its name for diagnostics, and its text.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Source {
    /// The file's name.
    pub name: String,
    /// What stands in it.
    pub text: String,
}

impl Source {
    /// A file of this name with this text.
    #[must_use]
    pub fn new(name: impl Into<String>, text: impl Into<String>) -> Self {
        Self { name: name.into(), text: text.into() }
    }
}

/// How to load.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Options {
    /// This profile for every domain, whatever the files say.
    pub profile: Option<Profile>,
    /// How many nodes share the limits, where that is known: what each may let through alone when the store is away.
    pub nodes: Option<u32>,
    /// Limits that all callers share are leased where their rules do not say how they are kept: the store is far.
    pub lease_shared: bool,
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
    /// Where each limit is, by its number: its rule, and its place among that rule's limits.
    limits: Vec<(u32, u32)>,
    warnings: Vec<Diagnostic>,
    sources: Vec<Source>,
    revision: String,
    /// How many nodes share the limits, where that is known.
    pub(crate) nodes: Option<u32>,
    /// Which rules can be changed for one caller; worked out when the first is.
    pub(crate) overridable: std::sync::OnceLock<Overridable>,
}

/// The rules of one domain.
#[derive(Clone, Debug)]
pub struct Domain {
    pub(crate) name: String,
    pub(crate) profile: Profile,
    /// For limits that say none, and for those that requests bring.
    pub(crate) algorithm: Algorithm,
    pub(crate) scope: ScopePath,
    /// The attribute that tells a caller's tier.
    pub(crate) tier_key: String,
    /// Whether any rule replaces others.
    pub(crate) replaces: bool,
    /// Whether a caller's tier bears on anything.
    pub(crate) depends_on_tier: bool,
    /// The root first, then every descriptor in the order of the file.
    pub(crate) tree: Vec<TreeNode>,
    /// Those of all domains; the tree says which are this one's.
    pub(crate) rules: Arc<[Rule]>,
}

impl Ruleset {
    /// Reads, checks and compiles rule files.
    ///
    /// # Errors
    /// Everything that is wrong with any of the files.
    pub fn load(sources: &[Source], options: &Options) -> Result<Self, Diagnostics> {
        let mut errors = Diagnostics::default();
        let mut warnings = Vec::new();
        let mut rules = Vec::new();
        let mut compiled: Vec<(Domain, Vec<compile::NodeLocation>, &Source)> = Vec::new();
        let mut by_name = HashMap::default();
        for source in sources {
            let mut reader = Reader { source, errors: &mut errors, warnings: &mut warnings };
            let Some(mut file) = decode::file(&mut reader) else { continue };
            reject_duplicate_domain(&mut reader, &mut file, &by_name, &compiled);
            if let Some((domain, places)) = compile::domain(&mut reader, file, options.profile, &mut rules) {
                by_name.insert(domain.name.clone(), compiled.len());
                compiled.push((domain, places, source));
            }
        }
        if !errors.is_empty() {
            return Err(errors);
        }
        placement::resolve_modes(&mut rules, options);
        let limits = assign_ids(&mut rules);
        let rules: Arc<[Rule]> = rules.into();
        let mut domains = Vec::with_capacity(compiled.len());
        for (mut domain, places, source) in compiled {
            domain.rules = Arc::clone(&rules);
            let replaces = domain.domain_rules().any(|rule| !rule.replaces.is_empty());
            domain.replaces = replaces;
            let asks_tier = domain.domain_rules().any(Rule::depends_on_tier);
            domain.depends_on_tier = asks_tier;
            let mut reader = Reader { source, errors: &mut errors, warnings: &mut warnings };
            lint::domain(&domain, &places, &mut reader);
            domains.push(domain);
        }
        Ok(Self {
            domains,
            by_name,
            rules,
            limits,
            warnings,
            sources: sources.to_vec(),
            revision: revision(sources, options),
            nodes: options.nodes,
            overridable: std::sync::OnceLock::new(),
        })
    }

    /// Returns the files that the rule set was compiled from.
    #[must_use]
    pub fn sources(&self) -> &[Source] {
        &self.sources
    }

    /// What loads, and does nothing.
    #[must_use]
    pub fn warnings(&self) -> &[Diagnostic] {
        &self.warnings
    }

    /// Twelve hexadecimal digits that are the same wherever the same rules are loaded.
    #[must_use]
    pub fn revision(&self) -> &str {
        &self.revision
    }

    /// All domains, in the order of the files.
    pub fn domains(&self) -> impl Iterator<Item = &Domain> {
        self.domains.iter()
    }

    /// The domain of this name.
    #[must_use]
    pub fn domain(&self, name: &str) -> Option<&Domain> {
        match &self.domains[..] {
            [only] => (only.name == name).then_some(only),
            _ => self.by_name.get(name).map(|i| &self.domains[*i]),
        }
    }

    /// All rules, in the order of the files; a rule's place is its id.
    #[must_use]
    pub fn rules(&self) -> &[Rule] {
        &self.rules
    }

    /// The limit with this number.
    #[must_use]
    pub fn limit(&self, id: u32) -> Option<&RuleLimit> {
        let (rule, place) = *self.limits.get(id as usize)?;
        self.rule(rule)?.all_limits().nth(place as usize)
    }

    /// The rule with this id.
    #[must_use]
    pub fn rule(&self, id: u32) -> Option<&Rule> {
        self.rules.get(id as usize)
    }
}

impl Domain {
    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// By which arithmetic it decides.
    #[must_use]
    pub const fn profile(&self) -> Profile {
        self.profile
    }

    /// The attribute that tells a caller's tier.
    #[must_use]
    pub fn tier_key(&self) -> &str {
        &self.tier_key
    }

    /// The values of a key that its rules name, wildcards apart.
    pub fn named_values<'a>(&'a self, key: &'a str) -> impl Iterator<Item = &'a str> {
        self.tree.iter().filter(move |node| *node.element.key == *key).filter_map(|node| {
            match &node.element.test {
                ValueTest::Exact(value) => Some(&**value),
                _ => None,
            }
        })
    }

    /// Everything that a value must be equal to for some rule to match: values that its rules name, and their tiers.
    pub fn literal_values(&self) -> impl Iterator<Item = &str> {
        let named = self.tree.iter().filter_map(|node| match &node.element.test {
            ValueTest::Exact(value) => Some(&**value),
            _ => None,
        });
        named.chain(self.domain_rules().flat_map(|rule| rule.tiers.iter().map(|(tier, _)| tier.as_str())))
    }

    /// The wildcards that its rules have for values that tell who asks.
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

    /// Its rules, in the order of the file.
    pub fn domain_rules(&self) -> impl Iterator<Item = &Rule> {
        self.tree.iter().filter_map(|node| node.rule).map(|id| &self.rules[id as usize])
    }
}

/// Numbers all limits; returns where each is.
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

/// One domain a file: the counters of two files with one domain would be each other's.
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
    // The rest of the file is still checked, under no name.
    file.domain.as_mut().into_iter().for_each(|domain| domain.value.push('\0'));
}

/// Of what the files say, not of where they lie or in which order they were named.
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
