//! The quota filter of Envoy (RLQS), which reports what it admits and gets assignments: its buckets against the rules.

use super::actions::{Entry, EntryValue, Template};
use super::cluster::Clusters;
use super::filter::{Share, share};
use super::finding::Report;
use super::proto::{all_typed, field, flag, text};
use serde_json::Value;

pub(super) const QUOTA_FILTER: &str =
    "envoy.extensions.filters.http.rate_limit_quota.v3.RateLimitQuotaFilterConfig";
const BUCKET: &str = "envoy.extensions.filters.http.rate_limit_quota.v3.RateLimitQuotaBucketSettings";

/// A quota filter.
#[derive(Debug)]
pub(super) struct QuotaFilter {
    pub(super) place: String,
    pub(super) domain: String,
    is_disabled: bool,
    /// The buckets, as descriptors whose entries are attributes.
    pub(super) buckets: Vec<Template>,
    config: Value,
}

impl QuotaFilter {
    pub(super) fn read(config: &Value, entry: Option<&Value>, place: &str, report: &mut Report) -> Self {
        let mut filter = Self {
            place: place.to_owned(),
            domain: text(config, "domain").unwrap_or_default().to_owned(),
            is_disabled: entry.is_some_and(|entry| flag(entry, "disabled")),
            buckets: Vec::new(),
            config: config.clone(),
        };
        if let Some(matchers) = field(config, "bucket_matchers") {
            for (path, settings) in all_typed(matchers, BUCKET) {
                filter.bucket(settings, &format!("{place}.bucket_matchers{path}"), report);
            }
        }
        filter
    }

    fn bucket(&mut self, settings: &Value, place: &str, report: &mut Report) {
        let builder = field(settings, "bucket_id_builder").and_then(|id| field(id, "bucket_id_builder"));
        let entries = builder.and_then(Value::as_object).into_iter().flatten().map(|(key, value)| {
            let fixed = text(value, "string_value").map(|value| EntryValue::Fixed(value.to_owned()));
            Entry::new(key, fixed.unwrap_or(EntryValue::Any))
        });
        let entries: Vec<Entry> = entries.collect();
        if entries.is_empty() {
            report.note(place, "requests of these matchers have no bucket: they are not limited");
            return;
        }
        let first = behavior(field(settings, "no_assignment_behavior"));
        let expired = field(settings, "expired_assignment_behavior");
        // Without one, requests are decided as before the first assignment.
        let expired = expired.map_or(first, |expired| behavior(Some(expired)));
        let template =
            Template { place: place.to_owned(), stage: 0, entries, unknown: None, has_limit: false };
        report.note(
            place,
            format!(
                "bucket {template}: until the first assignment Envoy {first}; when the last has expired it {expired}"
            ),
        );
        self.buckets.push(template);
    }

    pub(super) fn check(&self, clusters: &Clusters, report: &mut Report) {
        let Self { place, domain, config, .. } = self;
        if domain.is_empty() {
            report.problem(
                place,
                "the filter has no `domain`; Envoy refuses it",
                "set it to the domain of the rules",
            );
        }
        let asked = clusters.check(field(config, "rlqs_server"), place, report);
        report.note(
            place,
            format!("quota filter: Envoy reports its requests to {asked} for domain `{domain}`, and decides by what is assigned to it"),
        );
        if self.is_disabled {
            report.note(place, "the filter is disabled where no route enables it");
        }
        if share(config, "filter_enabled") == Share::None {
            report.problem(
                place,
                "the filter does nothing: its `filter_enabled` is 0 %",
                "set the share that is meant",
            );
        }
        if self.buckets.is_empty() {
            report.problem(
                place,
                "no matcher has a bucket: nothing is limited",
                "add `bucket_matchers` with RateLimitQuotaBucketSettings and a `bucket_id_builder`; see examples/envoy-quota",
            );
        }
        let matchers = field(config, "bucket_matchers");
        if matchers.is_some_and(|matchers| field(matchers, "on_no_match").is_none()) {
            report.note(place, "requests that no matcher selects are not limited (no `on_no_match`)");
        }
    }
}

/// Returns what Envoy does without an assignment.
fn behavior(setting: Option<&Value>) -> &'static str {
    let Some(setting) = setting else { return "lets all pass" };
    if field(setting, "reuse_last_assignment").is_some() {
        return "goes on with it";
    }
    let fallback = field(setting, "fallback_rate_limit");
    match fallback.and_then(|fallback| text(fallback, "blanket_rule")) {
        Some("DENY_ALL") => "denies all",
        None if fallback.is_some_and(|fallback| field(fallback, "token_bucket").is_some()) => {
            "limits by a bucket of its own"
        }
        _ => "lets all pass",
    }
}
