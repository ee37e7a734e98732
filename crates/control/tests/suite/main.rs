//! One suite on both databases: what operators decide is kept, acts, and is remembered, whichever of them keeps it.

#[path = "../databases/mod.rs"]
mod databases;

mod access;
mod active_rules;
mod bulk;
mod emergency;
mod nodes;
mod peer_samples;
mod pending_quotas;
mod quotas;
mod revisions;
mod snapshot;

use databases::{Place, Postgres};
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use tollgate_control::{Actor, ControlPlane, QuotaSpec};
use tollgate_core::{ManualClock, Timestamp};
use tollgate_rules::{Options, Ruleset, Source};

/// A case: gets the address of an empty database.
type Case = fn(String) -> Pin<Box<dyn Future<Output = ()> + Send>>;

macro_rules! cases {
    ($($module:ident::$name:ident),* $(,)?) => {
        [$((stringify!($name), (|address| Box::pin($module::$name(address))) as Case)),*]
    };
}

fn cases() -> Vec<(&'static str, Case)> {
    cases![
        quotas::what_is_put_is_read_until_it_is_deleted,
        quotas::a_change_that_was_not_seen_is_not_overwritten,
        quotas::lists_come_in_pages,
        quotas::what_cannot_act_is_refused_and_says_where,
        quotas::no_key_is_kept,
        quotas::what_was_deleted_goes_a_week_later,
        bulk::an_import_acts_and_its_export_can_be_imported_again,
        bulk::an_import_meets_what_is_there,
        bulk::keys_are_found_by_their_beginning,
        nodes::nodes_that_start_at_once_make_the_tables_once,
        nodes::two_nodes_converge,
        nodes::nodes_are_listed_until_they_leave,
        nodes::writers_at_once_lose_nothing,
        revisions::every_revision_is_kept_and_one_acts,
        revisions::of_many_who_go_back_one_does,
        revisions::approval_needs_another_person,
        active_rules::overrides_win_over_tiers_and_tiers_over_rules,
        active_rules::times_act_without_a_write,
        pending_quotas::what_acts_goes_on_until_the_new_does,
        pending_quotas::imports_take_nothing_away_before_the_time_either,
        active_rules::a_changed_number_keeps_what_was_used,
        emergency::measures_act_until_they_end,
        emergency::what_cannot_be_a_measure_is_refused_and_says_where,
        emergency::measures_act_on_every_node,
        emergency::a_grant_is_used_once_on_top_of_the_limit,
        emergency::what_is_taken_back_is_gone_where_the_clock_is_behind_or_ahead,
        peer_samples::what_all_nodes_remember_is_rehearsed_on,
        peer_samples::counters_of_each_node_are_rehearsed_apart,
        peer_samples::no_key_is_written_for_others,
        peer_samples::agreements_act_on_callers_whom_another_node_has_seen,
        access::tokens_prove_who_asks_until_they_are_revoked,
        access::a_look_tells_right_tokens_from_wrong_ones,
        access::the_audit_chain_shows_what_was_tampered_with,
    ]
    .to_vec()
}

fn run(case: Case, address: String) {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    runtime.expect("a runtime").block_on(case(address));
}

#[test]
fn on_sqlite() {
    for (name, case) in cases() {
        let place = Place::new();
        println!("{name}");
        run(case, place.sqlite(name));
    }
}

#[test]
#[cfg_attr(not(feature = "external-tests"), ignore = "needs PostgreSQL: make test")]
fn on_postgres() {
    let server = Postgres::start();
    for (name, case) in cases() {
        println!("{name}");
        run(case, server.database(name));
    }
}

/// 2026-01-01T00:00:00Z.
pub(crate) const START: u64 = 1_767_225_600;

pub(crate) async fn open(address: &str) -> (Arc<ControlPlane>, Arc<ManualClock>) {
    let clock = Arc::new(ManualClock::at(Timestamp::from_secs(START)));
    (ControlPlane::open(address, Arc::clone(&clock) as _).await.expect("a database"), clock)
}

pub(crate) async fn until(what: &str, mut seen: impl FnMut() -> bool) {
    for _ in 0..3_000 {
        if seen() {
            return;
        }
        tokio::time::sleep(std::time::Duration::from_millis(10)).await;
    }
    panic!("waited in vain: {what}");
}

pub(crate) fn somebody() -> Actor {
    Actor { name: "ada".to_owned(), origin: "127.0.0.1".to_owned() }
}

pub(crate) fn rules() -> Arc<Ruleset> {
    let text = "
domain: d
descriptors:
  - key: api_key
    limit: 3/minute
    tiers: {pro: 5/minute}
    descriptors:
      - key: endpoint
        value: POST /orders
        name: orders
        limit: 2/minute
  - key: path
    limit: 100/minute
";
    let rules = Ruleset::load(&[Source::new("test.yaml", text)], &Options::default());
    Arc::new(rules.unwrap_or_else(|errors| panic!("{errors}")))
}

pub(crate) fn draft(json: &serde_json::Value) -> QuotaSpec {
    serde_json::from_value(json.clone()).expect("a draft")
}
