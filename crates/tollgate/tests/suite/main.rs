//! The real binary, from outside: its listeners, its commands, its stores and what is around it.

mod billing;
mod caller_text;
mod cells;
#[cfg(feature = "external-tests")]
mod check_shedding;
mod cli;
mod config_errors;
mod connections;
#[path = "../../../control/tests/databases/mod.rs"]
mod databases;
mod doctor;
mod domains;
mod drain;
mod durable;
mod emergency;
#[cfg(feature = "external-tests")]
mod envoy;
mod explain;
mod fields;
mod fleet_fairness;
mod follow;
#[cfg(feature = "external-tests")]
mod follow_fleet;
mod forward_auth;
mod gateway_access_log;
mod gateway_health;
#[cfg(feature = "external-tests")]
mod gateway_interop;
#[cfg(feature = "external-tests")]
mod gateway_observability;
mod gateway_protocols;
#[cfg(feature = "external-tests")]
mod gateway_redis;
mod gateway_reload;
#[cfg(feature = "external-tests")]
mod grpc;
#[path = "../harness/mod.rs"]
mod harness;
mod health;
mod keys;
mod known_callers;
mod learned_cells;
mod named_stores;
mod observe;
mod one_identity;
#[cfg(feature = "external-tests")]
mod prometheus;
mod quota_guard;
#[cfg(feature = "external-tests")]
mod ratelimit;
mod redis;
mod redis_cluster;
mod regions;
mod reload;
mod reservations;
mod resp;
#[cfg(feature = "external-tests")]
mod rlqs;
mod rule_files;
mod rule_guardrails;
mod rule_tests;
mod rules_admin;
#[cfg(feature = "external-tests")]
mod sdk;
#[cfg(feature = "external-tests")]
mod signals;
#[cfg(feature = "external-tests")]
mod split_counters;
mod store_hiccups;
mod top;
mod traces;
mod usage;
#[cfg(feature = "external-tests")]
mod xds;
