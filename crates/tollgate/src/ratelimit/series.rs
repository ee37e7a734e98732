//! Counters by domain and descriptor, in a bounded number: every rule has its own; names from requests beyond the
//! maximum, in number or in bytes, share one, called `other`. That service keeps a counter for every value of a detailed
//! metric, without a bound.
//!
//! Names are compared as they are written, and Prometheus has two levels of them: what is one series there counts once
//! against the maximum. Deeper levels, which statsd and `/stats` have, are bounded by themselves, and cannot use up the
//! names of other rules.

use ring::digest;
use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::fmt::Write;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

/// Maximum number of names that requests bring, of two levels and of more.
pub(super) const MAX_SERIES: usize = 2_000;
/// Maximum size of those names together, in bytes.
const MAX_BYTES: usize = 512 << 10;
/// Maximum length of one level of a name, in bytes; a longer one is cut, and a hash of the whole follows.
const MAX_LEVEL: usize = 128;
/// Name of those beyond the maximum.
const OTHER: &str = "other";
/// Labels of levels in Prometheus. Deeper levels have none: their counts are added up.
const LABELS: [&str; 2] = ["key1", "key2"];

/// What is counted of a limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Counted {
    TotalHits,
    WithinLimit,
    NearLimit,
    OverLimit,
    OverLimitWithLocalCache,
    ShadowMode,
}

impl Counted {
    pub(super) const ALL: [Self; 6] = [
        Self::TotalHits,
        Self::WithinLimit,
        Self::NearLimit,
        Self::OverLimit,
        Self::OverLimitWithLocalCache,
        Self::ShadowMode,
    ];

    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::TotalHits => "total_hits",
            Self::WithinLimit => "within_limit",
            Self::NearLimit => "near_limit",
            Self::OverLimit => "over_limit",
            Self::OverLimitWithLocalCache => "over_limit_with_local_cache",
            Self::ShadowMode => "shadow_mode",
        }
    }
}

/// The counters of one descriptor.
#[derive(Debug)]
pub(super) struct Series {
    /// As it is written: sanitized.
    pub(super) domain: String,
    /// Levels of the descriptor, sanitized: `key` or `key_value`.
    pub(super) levels: Vec<String>,
    counts: [AtomicU64; Counted::ALL.len()],
}

impl Series {
    fn new(domain: &str, levels: Vec<String>) -> Arc<Self> {
        Arc::new(Self { domain: domain.to_owned(), levels, counts: Default::default() })
    }

    /// Returns the labels in Prometheus.
    pub(super) fn labels(&self) -> Vec<(&'static str, &str)> {
        let keys = LABELS.into_iter().zip(self.levels.iter().map(String::as_str));
        std::iter::once(("domain", self.domain.as_str())).chain(keys).collect()
    }

    /// Returns the part of a statsd name.
    pub(super) fn path(&self) -> String {
        // Once more: an address may be in several levels.
        sanitized(&name(&self.domain, &self.levels))
    }

    pub(super) fn add(&self, what: Counted, units: u64) {
        if units > 0 {
            self.counts[what as usize].fetch_add(units, Ordering::Relaxed);
        }
    }

    pub(super) fn count(&self, what: Counted) -> u64 {
        self.counts[what as usize].load(Ordering::Relaxed)
    }
}

/// All series, by name: those of the rules, which last as long as their rules, and those that requests name, which are
/// bounded.
#[derive(Debug, Default)]
pub(super) struct SeriesTable {
    all: RwLock<AllSeries>,
}

#[derive(Debug, Default)]
struct AllSeries {
    of_rules: HashMap<String, Arc<Series>>,
    of_requests: HashMap<String, Arc<Series>>,
    /// What Prometheus has of the names in `of_requests`.
    heads: HashSet<String>,
    /// Size of `heads`.
    head_bytes: usize,
    /// Number and size of the names in `of_requests` with more levels.
    deep: usize,
    deep_bytes: usize,
}

impl AllSeries {
    fn find(&self, name: &str) -> Option<&Arc<Series>> {
        self.of_rules.get(name).or_else(|| self.of_requests.get(name))
    }

    /// Adds a series that requests name.
    fn insert(&mut self, name: String, new: Arc<Series>) {
        self.count(&name, &new);
        self.of_requests.insert(name, new);
    }

    fn count(&mut self, name: &str, series: &Series) {
        let head = self::name(&series.domain, head(&series.levels));
        if series.levels.len() > LABELS.len() {
            self.deep += 1;
            self.deep_bytes += name.len();
        }
        let bytes = head.len();
        if self.heads.insert(head) {
            self.head_bytes += bytes;
        }
    }

    /// Counts the names of requests anew.
    fn recount(&mut self) {
        let of_requests = std::mem::take(&mut self.of_requests);
        (self.heads, self.head_bytes, self.deep, self.deep_bytes) = Default::default();
        of_requests.iter().for_each(|(name, series)| self.count(name, series));
        self.of_requests = of_requests;
    }

    /// Returns the domain and levels that a new name of a request may have.
    fn bounded(&self, domain: String, mut levels: Vec<String>) -> (String, Vec<String>) {
        let name = self::name(&domain, &levels);
        let own = self::name(&domain, head(&levels));
        let fits = self.heads.len() < MAX_SERIES && self.head_bytes + own.len() <= MAX_BYTES;
        if fits || self.heads.contains(&own) {
            let is_deep = levels.len() > LABELS.len();
            if is_deep && (self.deep >= MAX_SERIES || self.deep_bytes + name.len() > MAX_BYTES) {
                levels.truncate(LABELS.len());
                levels.push(OTHER.to_owned());
            }
            return (domain, levels);
        }
        let domain = if self.heads.len() < 2 * MAX_SERIES { domain } else { OTHER.to_owned() };
        (domain, vec![OTHER.to_owned()])
    }
}

impl SeriesTable {
    /// Returns the series with these levels. Beyond the maximum deeper levels are `other`; then the whole name is the
    /// domain's `other`, and then one for all domains.
    pub(super) fn series(&self, domain: &str, levels: &[String]) -> Arc<Series> {
        let written = |text: &str| sanitized(&cut(text));
        let domain = written(domain);
        let levels: Vec<String> = levels.iter().map(|level| written(level)).collect();
        let known = name(&domain, &levels);
        if let Some(known) = self.all.read().unwrap_or_else(PoisonError::into_inner).find(&known) {
            return Arc::clone(known);
        }
        let mut all = self.all.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = all.find(&known) {
            return Arc::clone(known);
        }
        let (domain, levels) = all.bounded(domain, levels);
        let name = name(&domain, &levels);
        if let Some(known) = all.find(&name) {
            return Arc::clone(known);
        }
        let new = Series::new(&domain, levels);
        all.insert(name, Arc::clone(&new));
        new
    }

    /// Makes these the series of the rules, and drops those of rules before that are no longer there. Returns them in the
    /// same order.
    pub(super) fn keep_rules(&self, rules: &[(String, Vec<String>)]) -> Vec<Arc<Series>> {
        let mut all = self.all.write().unwrap_or_else(PoisonError::into_inner);
        let mut before = std::mem::take(&mut all.of_rules);
        let mut kept = Vec::with_capacity(rules.len());
        for (domain, levels) in rules {
            let domain = sanitized(domain);
            let levels: Vec<String> = levels.iter().map(|level| sanitized(level)).collect();
            let name = name(&domain, &levels);
            let known = before.remove(&name).or_else(|| all.of_requests.remove(&name));
            let own = all.of_rules.entry(name);
            kept.push(Arc::clone(
                own.or_insert_with(|| known.unwrap_or_else(|| Series::new(&domain, levels))),
            ));
        }
        all.recount();
        kept
    }

    /// Returns all series, sorted by name.
    pub(super) fn all(&self) -> Vec<Arc<Series>> {
        let all = self.all.read().unwrap_or_else(PoisonError::into_inner);
        let mut all: Vec<_> = all.of_rules.iter().chain(&all.of_requests).collect();
        all.sort_by_key(|(name, _)| *name);
        all.into_iter().map(|(_, series)| Arc::clone(series)).collect()
    }
}

/// Adds up the counts of series that have the same labels in Prometheus: a page with a series twice cannot be read.
pub(super) fn by_labels(all: &[Arc<Series>], what: Counted) -> BTreeMap<Vec<(&'static str, &str)>, u64> {
    let mut sums = BTreeMap::new();
    for series in all.iter().filter(|series| series.count(what) > 0) {
        *sums.entry(series.labels()).or_default() += series.count(what);
    }
    sums
}

/// Returns the levels that Prometheus has.
fn head(levels: &[String]) -> &[String] {
    &levels[..levels.len().min(LABELS.len())]
}

/// Returns a level, or if it is too long, its beginning and a hash of it.
fn cut(level: &str) -> Cow<'_, str> {
    if level.len() <= MAX_LEVEL {
        return Cow::Borrowed(level);
    }
    let mut text = level[..level.floor_char_boundary(MAX_LEVEL)].to_owned();
    text.push('~');
    let hash = digest::digest(&digest::SHA256, level.as_bytes());
    for byte in &hash.as_ref()[..8] {
        let _ = write!(text, "{byte:02x}");
    }
    Cow::Owned(text)
}

fn name(domain: &str, levels: &[String]) -> String {
    let mut name = domain.to_owned();
    for level in levels {
        name.push('.');
        name.push_str(level);
    }
    name
}

/// Replaces what statsd gives a meaning to: `:`, `|`, and the dots of IPv4 addresses. Control characters would begin new
/// lines.
pub(super) fn sanitized(name: &str) -> String {
    let name = name.replace(|c: char| matches!(c, ':' | '|') || c.is_control(), "_");
    let bytes = name.as_bytes();
    let mut out = name.clone().into_bytes();
    let mut at = 0;
    while at < bytes.len() {
        match ipv4_length(&bytes[at..]) {
            Some(length) => {
                out[at..at + length].iter_mut().filter(|byte| **byte == b'.').for_each(|byte| *byte = b'_');
                at += length;
            }
            None => at += 1,
        }
    }
    String::from_utf8(out).unwrap_or(name)
}

/// Returns tags as labels of Prometheus: names of letters, digits and `_`, none that a metric here has itself, and each
/// once. Otherwise no scrape could be read.
pub(super) fn labels(tags: &[(String, String)]) -> Vec<(String, String)> {
    const OWN: [&str; 6] = ["domain", "key1", "key2", "err_type", "grpc_method", "le"];
    let mut labels: Vec<(String, String)> = Vec::with_capacity(tags.len());
    for (tag, value) in tags {
        let mut name = tag.replace(|c: char| !c.is_ascii_alphanumeric(), "_");
        let is_name = name.starts_with(|c: char| !c.is_ascii_digit()) && !name.starts_with("__");
        if !is_name || OWN.contains(&name.as_str()) {
            name = format!("tag_{name}");
        }
        if labels.iter().all(|(known, _)| *known != name) {
            labels.push((name, value.clone()));
        }
    }
    labels
}

/// Returns the length of the IPv4 address at the start of `text`: four groups of one to three digits.
fn ipv4_length(text: &[u8]) -> Option<usize> {
    let mut at = 0;
    for group in 0..4 {
        if group > 0 {
            if text.get(at) != Some(&b'.') {
                return None;
            }
            at += 1;
        }
        let digits = text[at..].iter().take(3).take_while(|byte| byte.is_ascii_digit()).count();
        if digits == 0 {
            return None;
        }
        at += digits;
    }
    Some(at)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_bounded() {
        let table = SeriesTable::default();
        for number in 0..3 * MAX_SERIES {
            table.series("d", &[format!("k_{number}")]).add(Counted::TotalHits, 1);
        }
        let all = table.all();
        assert_eq!(all.len(), MAX_SERIES + 1);
        let other = all.iter().find(|series| series.levels == ["other"]).expect("the rest");
        assert_eq!(other.count(Counted::TotalHits), 2 * MAX_SERIES as u64);
        for number in 0..3 * MAX_SERIES {
            table.series(&format!("d{number}"), &["k".to_owned()]);
        }
        assert!(table.all().len() <= 2 * MAX_SERIES + 1, "domains are bounded too");
    }

    /// Values of 8 KB would make pages of many megabytes.
    #[test]
    fn names_are_bounded_in_size() {
        let table = SeriesTable::default();
        let long = |number: usize| format!("k_{}{number}", "v".repeat(8_000));
        for number in 0..100 {
            table.series("d", &[long(number)]).add(Counted::TotalHits, 1);
        }
        table.series("d", &[long(0)]).add(Counted::TotalHits, 1);
        let all = table.all();
        assert_eq!(all.len(), 100, "different values stay apart");
        assert!(all.iter().all(|series| series.levels[0].len() <= MAX_LEVEL + 17));
        assert_eq!(all.iter().map(|series| series.count(Counted::TotalHits)).max(), Some(2));
        for number in 0..MAX_SERIES {
            table.series("d", &vec![long(number); 8]);
        }
        let size = |series: &Arc<Series>| series.levels.iter().map(String::len).sum::<usize>();
        assert!(table.all().iter().map(size).sum::<usize>() <= 2 * MAX_BYTES);
        assert!(table.all().iter().any(|series| series.levels == ["other"]));
    }

    /// Envoy Gateway has three levels for every rule with two selectors. Prometheus takes the first of equal series and
    /// drops the others.
    #[test]
    fn series_with_the_same_labels_are_one() {
        let table = SeriesTable::default();
        let levels = |levels: &[&str]| levels.iter().map(|level| (*level).to_owned()).collect::<Vec<_>>();
        let rules = [("d", ["r", "m0", "m1"]), ("d", ["r", "m0", "m2"]), ("d:e", ["a|b", "c", "x"])];
        let rules = rules.map(|(domain, own)| (domain.to_owned(), levels(&own)));
        for series in table.keep_rules(&rules) {
            series.add(Counted::TotalHits, 5);
        }
        for (domain, own) in [("d_e", "a_b"), ("d|e", "a:b"), ("d_e", "1.2.3.4"), ("d_e", "1_2_3_4")] {
            table.series(domain, &levels(&[own, "c"])).add(Counted::TotalHits, 1);
        }
        let all = table.all();
        let sums: Vec<_> = by_labels(&all, Counted::TotalHits).into_iter().collect();
        let expected = [
            (vec![("domain", "d"), ("key1", "r"), ("key2", "m0")], 10),
            (vec![("domain", "d_e"), ("key1", "1_2_3_4"), ("key2", "c")], 2),
            (vec![("domain", "d_e"), ("key1", "a_b"), ("key2", "c")], 7),
        ];
        assert_eq!(sums, expected);
        assert!(by_labels(&all, Counted::OverLimit).is_empty());
    }

    /// Otherwise the third level of one rule would use up the names of all.
    #[test]
    fn what_is_one_series_counts_once() {
        let table = SeriesTable::default();
        for number in 0..3 * MAX_SERIES {
            let deep = ["a".to_owned(), "b".to_owned(), format!("c_{number}")];
            table.series("d", &deep).add(Counted::TotalHits, 1);
            table.series("d", &[format!("e{}", [":", "|", "_"][number % 3])]).add(Counted::TotalHits, 1);
        }
        let all = table.all();
        assert_eq!(all.len(), MAX_SERIES + 2, "deeper levels are bounded");
        let sums: Vec<_> = by_labels(&all, Counted::TotalHits).into_iter().collect();
        let every = 3 * MAX_SERIES as u64;
        let expected = [
            (vec![("domain", "d"), ("key1", "a"), ("key2", "b")], every),
            (vec![("domain", "d"), ("key1", "e_")], every),
        ];
        assert_eq!(sums, expected);
        assert_eq!(table.series("d", &["new".to_owned()]).levels, ["new"]);
    }

    #[test]
    fn names_are_sanitized_as_the_service_does() {
        assert_eq!(sanitized("masked_remote_address_127.0.0.0/8"), "masked_remote_address_127_0_0_0/8");
        assert_eq!(sanitized("a:b|c.d 1.2.3"), "a_b_c.d 1.2.3");
        assert_eq!(sanitized("a\nb 1|c\r"), "a_b 1_c_");
    }

    #[test]
    fn tags_become_labels_that_a_scrape_can_have() {
        let pair = |(name, value): (&str, &str)| (name.to_owned(), value.to_owned());
        let tags = [
            ("k8s-cluster", "a"),
            ("k8s.cluster", "b"),
            ("domain", "c"),
            ("1st", "d"),
            ("__x", "e"),
            ("env", "f"),
        ];
        let expected =
            [("k8s_cluster", "a"), ("tag_domain", "c"), ("tag_1st", "d"), ("tag___x", "e"), ("env", "f")];
        assert_eq!(labels(&tags.map(pair)), expected.map(pair));
    }

    /// Otherwise an untrusted client could use up the metrics of every rule that is added.
    #[test]
    fn a_rule_has_its_series_whatever_requests_have_named() {
        let table = SeriesTable::default();
        for number in 0..3 * MAX_SERIES {
            table.series("d", &[format!("k_{number}")]);
        }
        table.series("d", &["k_1".to_owned()]).add(Counted::TotalHits, 5);
        let own = |key: &str| ("d".to_owned(), vec![key.to_owned()]);
        let rules = table.keep_rules(&[own("rule"), own("k_1")]);
        assert_eq!(rules[0].levels, ["rule"]);
        assert_eq!(rules[1].count(Counted::TotalHits), 5, "requests had named it");
        rules[0].add(Counted::TotalHits, 1);
        assert!(Arc::ptr_eq(&table.series("d", &["rule".to_owned()]), &rules[0]));
        let again = table.keep_rules(&[own("rule")]);
        assert_eq!(again[0].count(Counted::TotalHits), 1, "counters last across reloads");
        assert!(table.all().iter().all(|series| series.levels != ["k_1"]), "its rule is gone");
    }
}
