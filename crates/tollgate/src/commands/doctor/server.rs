//! A running server: its rules, and what keeps it from limiting as they say.

use super::finding::Report;
use crate::admin_client::Client;
use anyhow::Context;
use hyper::{Method, StatusCode};
use serde_json::Value;
use tollgate_rules::{Options, Ruleset, Source};

/// Examines a server. Returns its rules.
pub(super) async fn check(client: &Client, report: &mut Report) -> anyhow::Result<Ruleset> {
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
    report.note(
        place,
        format!(
            "{} rules from {}, revision {}",
            rules["count"],
            text(&rules["source"]),
            text(&rules["revision"])
        ),
    );
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
    Ruleset::load(&sources, &Options::default())
        .map_err(|errors| anyhow::anyhow!("this version cannot read the server's rules\n{errors}"))
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
    if state["version"].is_null() {
        let id = state["node_id"].as_str().unwrap_or("?");
        report.problem(
            place,
            format!(
                "no configuration has come from the management server {server}: nothing of it is limited"
            ),
            format!("check that it has one for node ID `{id}`"),
        );
    }
    if let Some(refused) = state["refused"].as_str() {
        report.problem(
            place,
            format!("the last configuration of {server} is refused: {refused}"),
            "repair it there",
        );
    }
}
