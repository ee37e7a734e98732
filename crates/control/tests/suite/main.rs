//! Suite of control-plane tests, run on both databases.

#[path = "../databases/mod.rs"]
mod databases;

mod access;
mod active_rules;
mod billing;
mod bulk;
mod durable;
mod emergency;
mod history;
mod impact_preview;
mod nodes;
mod peer_samples;
mod pending_quotas;
mod quota_keys;
mod quotas;
mod revisions;
mod shared_records;
mod snapshot;

use databases::{Place, Postgres};
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use tollgate_control::{Actor, ControlPlane, QuotaSpec};
use tollgate_core::{ManualClock, Timestamp};
use tollgate_rules::{Options, Ruleset, Source};

/// A test case; receives the address of an empty database.
type Case = fn(String) -> Pin<Box<dyn Future<Output = ()> + Send>>;

macro_rules! cases {
    ($($module:ident::$name:ident),* $(,)?) => {
        [$((stringify!($name), (|address| Box::pin($module::$name(address))) as Case)),*]
    };
}

fn cases() -> Vec<(&'static str, Case)> {
    cases![
        quotas::a_quota_is_stored_until_it_is_deleted,
        quotas::a_concurrent_change_is_not_overwritten,
        quotas::lists_are_paged,
        quotas::an_invalid_quota_is_rejected_with_its_field,
        quotas::no_key_is_stored,
        quotas::deleted_quotas_are_purged_after_a_week,
        quota_keys::users_and_tenants_have_tiers_and_overrides,
        quota_keys::the_rules_decide_which_quota_counts,
        quota_keys::networks_have_quotas_and_the_longest_prefix_wins,
        quota_keys::grants_and_resets_are_for_any_caller,
        quota_keys::lists_and_files_name_the_attribute,
        quota_keys::a_snapshot_keeps_the_attribute,
        quota_keys::an_import_keeps_the_bound_on_network_lengths,
        bulk::an_import_takes_effect_and_its_export_can_be_imported,
        bulk::an_import_replaces_existing_quotas,
        bulk::keys_are_found_by_prefix,
        durable::durable_rows_are_absolute,
        shared_records::an_exchange_compares_and_expires,
        nodes::concurrent_starts_migrate_once,
        nodes::two_nodes_converge,
        nodes::a_step_of_adapted_limits_is_audited_without_a_revision,
        nodes::nodes_are_listed_until_they_deregister,
        nodes::hot_counters_reach_the_other_nodes,
        nodes::concurrent_writers_lose_nothing,
        revisions::every_revision_is_kept_and_one_is_active,
        revisions::one_of_several_rollbacks_succeeds,
        revisions::approval_needs_another_operator,
        active_rules::overrides_win_over_tiers_and_tiers_over_rules,
        active_rules::times_take_effect_without_a_write,
        pending_quotas::current_terms_stay_until_the_new_take_effect,
        pending_quotas::imports_keep_current_terms_too,
        active_rules::a_changed_limit_keeps_the_usage,
        emergency::measures_are_active_until_they_end,
        emergency::an_invalid_measure_is_rejected_with_its_field,
        emergency::measures_are_active_on_every_node,
        emergency::a_grant_is_used_once_on_top_of_the_limit,
        emergency::a_revoked_grant_is_gone_despite_clock_skew,
        peer_samples::samples_of_all_nodes_are_replayed,
        peer_samples::per_node_counters_are_replayed_separately,
        peer_samples::no_key_is_written_to_the_database,
        peer_samples::quotas_apply_to_callers_of_other_nodes,
        billing::consumption_is_complete_and_counted_once,
        billing::consumption_survives_an_outage,
        billing::old_hours_become_months,
        billing::deliveries_resume_and_are_corrected,
        access::tokens_authenticate_until_they_are_revoked,
        access::the_precheck_recognizes_wrong_tokens,
        access::the_audit_chain_reveals_tampering,
        access::the_audit_log_is_filtered,
        history::minutes_of_all_nodes_are_summed,
        history::old_minutes_become_coarse_and_expire,
        history::a_step_keeps_its_busiest_callers,
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

pub(crate) async fn until(what: &str, mut condition: impl FnMut() -> bool) {
    for _ in 0..3_000 {
        if condition() {
            return;
        }
        tokio::time::sleep(std::time::Duration::from_millis(10)).await;
    }
    panic!("timed out waiting for {what}");
}

pub(crate) fn operator() -> Actor {
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
