//! A running server: its rules, and what keeps it from limiting as they say.

use super::finding::Report;
use crate::admin_client::Client;
use crate::cli::ProfileName;
use crate::config;
use anyhow::Context;
use hyper::{Method, StatusCode};
use serde_json::Value;
use tollgate_rules::{Diagnostics, Options, Ruleset, Source};

/// Examines a server. Returns its rules, if they can be read.
pub(super) async fn check(
    client: &Client,
    profile: Option<ProfileName>,
    report: &mut Report,
) -> anyhow::Result<Option<Ruleset>> {
    let place = "the server";
    let answer = client.exchange(Method::GET, "/readyz?verbose", &[], None).await?;
    let state = &answer.body;
    if answer.status != StatusCode::OK {
        let why = if state["draining"] == true { "it is draining" } else { "it has not loaded its state" };
        report.problem(
            place,
            format!("the server is not ready: {why}"),
            "wait, or see its log and /readyz?verbose",
        );
    }
    let rules = &state["rules"];
    let text = |value: &Value| value.as_str().unwrap_or("?").to_owned();
    if let Some(error) = rules["error"].as_str() {
        report.problem(
            place,
            format!("the last change of the rules was not applied: {error}"),
            "repair it; the rules before it are active",
        );
    }
    if rules["last_good"] == true {
        report.warning(
            place,
            "the last good copy of the rule files is active, not the files",
            "repair or confirm the files",
        );
    }
    xds(&state["xds"], place, report);
    for shard in state["store"]["shards"].as_array().into_iter().flatten() {
        if shard["breaker"] != "closed" {
            let error = shard["error"].as_str().map(|error| format!(": {error}")).unwrap_or_default();
            report.problem(
                place,
                format!(
                    "the store at {} does not answer{error}; rules decide by their `on_error`",
                    text(&shard["address"])
                ),
                "check Redis and the network to it",
            );
        }
    }
    let current = client.request(Method::GET, "/admin/v1/rules/current", None).await?;
    let files = current["files"].as_array().context("the server sent no rules")?;
    let source = |file: &Value| Source::new(text(&file["name"]), text(&file["text"]));
    let sources: Vec<Source> = files.iter().map(source).collect();
    let from = origin(&sources, text(&rules["source"]));
    report
        .note(place, format!("{} rules from {from}, revision {}", rules["count"], text(&rules["revision"])));
    let loaded = load(&sources, profile, rules["revision"].as_str().unwrap_or_default());
    Ok(loaded
        .map_err(|errors| {
            report.problem(
                place,
                format!("descriptors are not checked: this version cannot read the server's rules\n{errors}"),
                "use the doctor of the server's version",
            );
        })
        .ok())
}

/// Loads rules that a server has accepted. How it reads them is not among what it sends, but their hash depends on the
/// profile, so the profile with that hash is the server's. Files are read as `serve` reads them, else as `tollgate ratelimit`
/// does, which accepts all that envoyproxy/ratelimit accepts.
fn load(sources: &[Source], profile: Option<ProfileName>, hash: &str) -> Result<Ruleset, Diagnostics> {
    let profiles = match profile {
        Some(profile) => vec![Some(profile)],
        None => vec![None, Some(ProfileName::Envoy), Some(ProfileName::Native)],
    };
    let options = profiles.into_iter().flat_map(|profile| {
        let strict = Options { merge_domains: true, ..config::options(profile) };
        [strict.clone(), Options { ratelimit_files: true, ..strict }]
    });
    let (mut other, mut failure) = (None, None);
    for options in options {
        match Ruleset::load(sources, &options) {
            Ok(rules) if rules.revision() == hash => return Ok(rules),
            Ok(rules) => {
                other.get_or_insert(rules);
            }
            Err(errors) => {
                failure.get_or_insert(errors);
            }
        }
    }
    other.ok_or_else(|| failure.unwrap_or_default())
}

/// Returns where rules come from. A server with rules from xDS may have files beside them, or alone until some have come.
fn origin(sources: &[Source], source: String) -> String {
    if source != "xds" {
        return source;
    }
    let of_xds = sources.iter().filter(|source| source.name.starts_with("xds/")).count();
    match (of_xds, sources.len() - of_xds) {
        (0, 1..) => "files".to_owned(),
        (1.., 1..) => "xds and files".to_owned(),
        _ => source,
    }
}

fn xds(state: &Value, place: &str, report: &mut Report) {
    if state.is_null() {
        return;
    }
    let server = state["server"].as_str().unwrap_or("?");
    if let Some(error) = state["error"].as_str() {
        report.problem(
            place,
            format!("no stream to the management server {server}: {error}"),
            "the rules stay as they are meanwhile",
        );
    }
    if let Some(refused) = state["refused"].as_str() {
        report.problem(
            place,
            format!("the last configuration of {server} is refused: {refused}"),
            "repair it there",
        );
    } else if state["version"].is_null() {
        let id = state["node_id"].as_str().unwrap_or("?");
        report.problem(
            place,
            format!(
                "no configuration has come from the management server {server}: nothing of it is limited"
            ),
            format!("check that it has one for node ID `{id}`"),
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::commands::doctor::finding::Level;
    use serde_json::json;
    use tollgate_rules::Profile;

    /// A server that has these rules limits by them, so they can be examined.
    #[test]
    fn rules_of_a_compatible_server_are_read() {
        let merged = ["a", "b"].map(|key| {
            let text = format!(
                "domain: d\ndescriptors: [{{key: {key}, rate_limit: {{unit: hour, requests_per_unit: 1}}}}]\n"
            );
            Source::new(key, text)
        });
        let equal_keys = "domain: d\ndescriptors:\n  - key: a\n    key: b\n    rate_limit: {unit: hour, requests_per_unit: 1}\n";
        let unlimited =
            "domain: d\ndescriptors: [{key: a, rate_limit: {unlimited: true, unit: fortnight}}]\n";
        for (sources, rules) in [
            (merged.to_vec(), 2),
            (vec![Source::new("f", equal_keys)], 1),
            (vec![Source::new("f", unlimited)], 1),
        ] {
            let loaded = load(&sources, None, "").expect("rules that tollgate ratelimit accepts");
            assert_eq!(loaded.rule_count(), rules, "{sources:?}");
        }
        assert!(load(&[Source::new("f", "domain: d\nno: key\n")], None, "").is_err());
    }

    /// Rules mean something else under another profile: this key is a network under one of them alone.
    #[test]
    fn the_profile_of_the_server_is_found_by_the_hash() {
        let source = [Source::new("f", "domain: d\ndescriptors: [{key: ip/24, limit: 1/s}]\n")];
        for profile in [None, Some(ProfileName::Envoy), Some(ProfileName::Native)] {
            let own = Ruleset::load(&source, &config::options(profile)).expect("valid rules");
            let found = load(&source, None, own.revision()).expect("valid rules");
            let is_envoy =
                |rules: &Ruleset| rules.domain("d").map(|domain| domain.profile() == Profile::Envoy);
            assert_eq!(is_envoy(&found), is_envoy(&own), "{profile:?}");
            assert_eq!(found.revision(), own.revision(), "{profile:?}");
        }
    }

    #[test]
    fn rules_of_files_beside_xds_are_not_from_xds() {
        let source = |name: &str| Source::new(name, "");
        for (names, from) in [
            (&["config.a"][..], "files"),
            (&["xds/a", "config.a"], "xds and files"),
            (&["xds/a"], "xds"),
            (&[], "xds"),
        ] {
            let sources: Vec<Source> = names.iter().map(|name| source(name)).collect();
            assert_eq!(origin(&sources, "xds".to_owned()), from, "{names:?}");
        }
        assert_eq!(origin(&[source("a")], "database".to_owned()), "database");
    }

    #[test]
    fn a_refused_configuration_has_come() {
        for (state, part) in [
            (json!({"server": "s", "refused": "unknown unit"}), "is refused: unknown unit"),
            (json!({"server": "s"}), "no configuration has come"),
        ] {
            let mut report = Report::default();
            xds(&state, "here", &mut report);
            let problems: Vec<_> = report.findings.iter().filter(|one| one.level == Level::Problem).collect();
            assert!(problems.len() == 1 && problems[0].message.contains(part), "{problems:#?}");
        }
    }
}
