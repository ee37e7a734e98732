//! Overload endpoint: `GET /admin/v1/overload` returns what this node sheds, and which limits follow signals.

use crate::AdminState;
use crate::auth::Viewer;
use crate::response::json_response;
use axum::extract::State;
use axum::response::Response;
use http::StatusCode;
use serde::Serialize;
use std::sync::Arc;
use tollgate_core::Priority;
use tollgate_engine::{
    AdaptationState, CheckLoadState, FleetPriorityState, FleetState, HeldLimits, Limiter, POSITIONS,
    ShedOrder, SignalState, TierState, UpstreamState,
};
use tollgate_rules::TierFairness;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

/// Overload of a node: its upstreams, the fleet's capacity, and its adapted limits.
#[derive(Default, Serialize, ToSchema)]
pub struct OverloadReport {
    /// Upstreams whose requests in flight are limited.
    upstreams: Vec<UpstreamReport>,
    /// Domains whose requests share a capacity of the whole fleet.
    fleets: Vec<FleetReport>,
    /// Domains whose limits follow signals.
    adapted: Vec<AdaptedReport>,
    /// Checks that wait for the store; null if they are never shed.
    #[schema(required = true)]
    checks: Option<ChecksReport>,
}

/// The gate of an upstream.
#[derive(Serialize, ToSchema)]
struct UpstreamReport {
    domain: String,
    upstream: String,
    /// Whether nothing is shed, only counted.
    shadow: bool,
    /// Limit of requests in flight.
    limit: u32,
    in_flight: u32,
    /// Requests that wait for a place in flight.
    waiting: u32,
    /// Part of the order of shedding that is served: 1 if nothing is shed.
    threshold: f64,
    demand_per_second: f64,
    /// Requests per second that the upstream has shown to serve.
    capacity_per_second: f64,
    /// Latency without queueing; null until measured.
    #[schema(required = true)]
    base_latency_ms: Option<f64>,
    /// The priorities, the one that is shed last first.
    priorities: Vec<PriorityReport>,
    /// Shares of tenants by tier; empty if tenants are not distinguished.
    tiers: Vec<TierReport>,
}

/// What became of the requests of a priority, since the start.
#[derive(Serialize, ToSchema)]
struct PriorityReport {
    priority: &'static str,
    /// Part of the priority's places in the order of shedding that is served. Without fair shares a place is one of 128
    /// groups of callers; with them the first half of the places is for requests within their tenants' shares, the second
    /// for those beyond.
    served: f64,
    /// Part of the callers served within their tenants' fair shares; null if tenants are not distinguished.
    #[schema(required = true)]
    served_within_share: Option<f64>,
    /// Part of the callers served beyond their tenants' fair shares; null if tenants are not distinguished.
    #[schema(required = true)]
    served_beyond_share: Option<f64>,
    admitted: u64,
    shed: u64,
    /// Requests that would have been shed but for shadow mode.
    would_be_shed: u64,
}

/// Shares of the tenants of a tier.
#[derive(Serialize, ToSchema)]
struct TierReport {
    /// The tier; `other` for tenants without a configured one.
    tier: String,
    /// Tenants that sent requests of late.
    tenants: u32,
    demand_per_second: f64,
    /// Requests per second that are guaranteed.
    guaranteed_per_second: f64,
    /// `each` if every tenant has the guarantee, `together` if all share it.
    guaranteed_to: &'static str,
    /// Requests per second of one tenant up to which it is within its fair share; null if all demand fits.
    #[schema(required = true)]
    fair_per_second: Option<f64>,
}

/// The fleet's capacity of a domain, as this node sees it.
#[derive(Serialize, ToSchema)]
struct FleetReport {
    domain: String,
    /// The capacity: `5000 in flight` or `20000/1s`.
    capacity: String,
    /// Whether nothing is shed, only counted.
    shadow: bool,
    /// The priorities, the one that has most of it first.
    priorities: Vec<FleetPriorityReport>,
    /// Whether tenants share it and a request of this node found it in use within the last second.
    contended: bool,
    /// Requests that a guarantee admitted while the capacity was in use, since the start.
    guaranteed: u64,
    /// Shares of tenants by tier, of what this node's requests get of the capacity; demand and fair shares are measured while
    /// it is contended. Empty if tenants are not distinguished.
    tiers: Vec<FleetTierReport>,
}

/// What requests of a priority may use of the fleet's capacity, and what became of them on this node, since the start.
#[derive(Serialize, ToSchema)]
struct FleetPriorityReport {
    priority: &'static str,
    /// Requests in flight, or in the capacity's period, that they may use: all but what is reserved for higher priorities.
    capacity: u64,
    shed: u64,
    /// Requests that would have been shed but for shadow mode.
    would_be_shed: u64,
}

/// Shares of the tenants of a tier in the fleet's capacity.
#[derive(Serialize, ToSchema)]
struct FleetTierReport {
    /// The tier; `other` for tenants without a configured one.
    tier: String,
    /// Percent of the capacity that is guaranteed.
    guaranteed_percent: f64,
    /// `each` if every tenant has the guarantee, `together` if all share it.
    guaranteed_to: &'static str,
    /// Tenants that sent requests of late.
    tenants: u32,
    demand_per_second: f64,
    /// Requests per second of one tenant up to which it is within its fair share; null if all demand fits.
    #[schema(required = true)]
    fair_per_second: Option<f64>,
}

/// Limits of a domain that follow signals.
#[derive(Serialize, ToSchema)]
struct AdaptedReport {
    domain: String,
    signals: Vec<SignalReport>,
    /// Tiers in the order in which their limits are tightened.
    tiers: Vec<AdaptedTierReport>,
    /// Why limits stay as in the rules: `shadow` mode, or an emergency `measure`; null if they do not.
    #[schema(required = true)]
    held: Option<&'static str>,
}

/// A signal, and its bound.
#[derive(Serialize, ToSchema)]
struct SignalReport {
    signal: String,
    /// Highest value of the last two steps.
    value: f64,
    bound: f64,
    /// Where its values come from: `pushed`, `measured` by the gateway, or a `query` to a Prometheus.
    source: &'static str,
}

/// A tier whose limits follow signals.
#[derive(Serialize, ToSchema)]
struct AdaptedTierReport {
    tier: String,
    /// Percent of its limits that apply.
    percent: f64,
    /// Percent of its limits that would apply if they were not held; null if they do apply.
    #[schema(required = true)]
    shadow_percent: Option<f64>,
}

/// Checks that wait for the store.
#[derive(Serialize, ToSchema)]
struct ChecksReport {
    /// Checks that wait now.
    pending: u32,
    /// Mean time that they waited, of late.
    wait_ms: f64,
    /// Mean wait above which checks are shed.
    target_ms: f64,
    /// Classes in the order in which they are shed.
    classes: Vec<ClassReport>,
}

/// Checks of a class.
#[derive(Serialize, ToSchema)]
struct ClassReport {
    class: &'static str,
    /// Part of its checks that goes without the store.
    shed_part: f64,
    /// Checks that went without the store, since the start.
    shed: u64,
}

impl From<CheckLoadState> for ChecksReport {
    fn from(state: CheckLoadState) -> Self {
        let class = |class: ShedOrder| {
            let at = class as usize;
            ClassReport { class: class.name(), shed_part: state.shed_part[at], shed: state.shed[at] }
        };
        Self {
            pending: state.pending,
            wait_ms: state.wait * 1e3,
            target_ms: state.target * 1e3,
            classes: ShedOrder::ALL.map(class).into(),
        }
    }
}

impl OverloadReport {
    /// Creates the report of the process that this limiter decides for.
    #[must_use]
    pub fn new<S>(limiter: &Limiter<S>) -> Self {
        Self {
            upstreams: limiter.upstream_states().into_iter().map(UpstreamReport::from).collect(),
            fleets: limiter.fleet_states().into_iter().map(FleetReport::from).collect(),
            adapted: limiter.adaptations().into_iter().map(AdaptedReport::from).collect(),
            checks: limiter.check_load().map(ChecksReport::from),
        }
    }
}

/// Returns the tiers with shares by name, and the one of all other tenants, each with its state.
fn with_states<'a>(
    shares: &'a [TierFairness],
    states: &'a [TierState],
) -> impl Iterator<Item = (Option<&'a TierFairness>, TierState)> {
    let states = states.iter().copied().chain(std::iter::repeat(TierState::default()));
    shares.iter().map(Some).chain([None]).zip(states)
}

fn tier_name(share: Option<&TierFairness>) -> String {
    share.map_or("other", |share| &share.tier).to_owned()
}

fn guaranteed_to(share: Option<&TierFairness>) -> &'static str {
    if share.is_some_and(|share| share.is_each) { "each" } else { "together" }
}

impl From<FleetState> for FleetReport {
    fn from(state: FleetState) -> Self {
        let tier = |(share, own): (Option<&TierFairness>, TierState)| FleetTierReport {
            tier: tier_name(share),
            guaranteed_percent: share.map_or(0.0, |share| share.guarantee as f64 / 10.0),
            guaranteed_to: guaranteed_to(share),
            tenants: own.tenants,
            demand_per_second: own.demand,
            fair_per_second: own.fair,
        };
        let priority = |priority: Priority| {
            let FleetPriorityState { capacity, shed, would_be_shed } = state.priorities[priority.index()];
            FleetPriorityReport { priority: priority.name(), capacity, shed, would_be_shed }
        };
        let shares = state.shares.as_ref();
        Self {
            shadow: state.is_shadow,
            priorities: Priority::ALL.map(priority).into(),
            contended: shares.is_some_and(|shared| !shared.tiers.is_empty()),
            guaranteed: shares.map_or(0, |shared| shared.taken_back),
            tiers: shares.map_or_else(Vec::new, |shared| {
                with_states(&shared.shares, &shared.tiers).map(tier).collect()
            }),
            capacity: state.capacity,
            domain: state.domain,
        }
    }
}

impl From<UpstreamState> for UpstreamReport {
    fn from(state: UpstreamState) -> Self {
        let gate = &state.gate;
        let has_shares = !gate.tiers.is_empty();
        let of_each = f64::from(POSITIONS) / Priority::ALL.len() as f64;
        let priority = |priority: Priority| {
            let at = priority.index();
            let served = ((f64::from(gate.threshold) - of_each * at as f64) / of_each).clamp(0.0, 1.0);
            let of_half = |half: f64| has_shares.then(|| (served * 2.0 - half).clamp(0.0, 1.0));
            PriorityReport {
                priority: priority.name(),
                served,
                served_within_share: of_half(0.0),
                served_beyond_share: of_half(1.0),
                admitted: gate.admitted[at],
                shed: gate.shed[at],
                would_be_shed: gate.shadowed[at],
            }
        };
        let tiers = with_states(&state.shares, &gate.tiers).take(gate.tiers.len());
        let tiers = tiers.map(|(share, own)| TierReport {
            tier: tier_name(share),
            tenants: own.tenants,
            demand_per_second: own.demand,
            guaranteed_per_second: own.guarantee,
            guaranteed_to: guaranteed_to(share),
            fair_per_second: own.fair,
        });
        Self {
            shadow: gate.is_shadow,
            limit: gate.limit,
            in_flight: gate.in_flight,
            waiting: gate.waiting,
            threshold: f64::from(gate.threshold) / f64::from(POSITIONS),
            demand_per_second: gate.demand,
            capacity_per_second: gate.throughput,
            base_latency_ms: gate.base_latency.map(|seconds| seconds * 1e3),
            priorities: Priority::ALL.map(priority).into(),
            tiers: tiers.collect(),
            domain: state.domain,
            upstream: state.upstream,
        }
    }
}

impl From<AdaptationState> for AdaptedReport {
    fn from(state: AdaptationState) -> Self {
        let signal =
            |SignalState { name, value, bound, source }| SignalReport { signal: name, value, bound, source };
        let signals = state.signals.into_iter().map(signal);
        let held = state.tiers.first().and_then(|tier| tier.held).map(HeldLimits::name);
        let tiers = state.tiers.into_iter().map(|tier| AdaptedTierReport {
            percent: tier.percent(),
            shadow_percent: tier.shadow_percent(),
            tier: tier.tier,
        });
        Self { domain: state.domain, signals: signals.collect(), tiers: tiers.collect(), held }
    }
}

pub(crate) fn routes() -> OpenApiRouter<Arc<AdminState>> {
    OpenApiRouter::new().routes(routes!(get))
}

/// Returns what this node sheds, and which limits follow signals.
#[utoipa::path(get, path = "/admin/v1/overload", operation_id = "GET_overload",
    responses((status = 200, description = "Overload of this node.", body = OverloadReport)),
    extensions(("x-role" = json!("viewer"))))]
async fn get(State(admin): State<Arc<AdminState>>, _: Viewer) -> Response {
    json_response(StatusCode::OK, &(admin.overload)())
}

#[cfg(test)]
mod tests {
    use super::*;
    use tollgate_engine::{FleetSharesState, GateState, TierState};

    fn normal(threshold: u16, tiers: Vec<TierState>) -> (f64, Option<f64>, Option<f64>) {
        let gate = GateState { threshold, tiers, ..GateState::default() };
        let state =
            UpstreamState { domain: "d".to_owned(), upstream: "u".to_owned(), shares: Vec::new(), gate };
        let report = UpstreamReport::from(state);
        let row = report.priorities.iter().find(|row| row.priority == "normal").expect("a priority");
        (row.served, row.served_within_share, row.served_beyond_share)
    }

    #[test]
    fn excess_is_shed_before_what_is_within_shares() {
        let each = POSITIONS / 4;
        let shared = |threshold| normal(threshold, vec![TierState::default()]);
        assert_eq!(normal(each * 2 + each / 2, Vec::new()), (0.5, None, None));
        assert_eq!(shared(each * 3), (1.0, Some(1.0), Some(1.0)));
        assert_eq!(shared(each * 2 + each / 4 * 3), (0.75, Some(1.0), Some(0.5)));
        assert_eq!(shared(each * 2 + each / 2), (0.5, Some(1.0), Some(0.0)));
        assert_eq!(shared(each * 2 + each / 4), (0.25, Some(0.5), Some(0.0)));
        assert_eq!(shared(each), (0.0, Some(0.0), Some(0.0)));
    }

    fn fleet(shares: Option<FleetSharesState>) -> FleetReport {
        let own = |capacity, shed| FleetPriorityState { capacity, shed, would_be_shed: 0 };
        FleetReport::from(FleetState {
            domain: "d".to_owned(),
            capacity: "100 in flight".to_owned(),
            is_shadow: false,
            priorities: [own(100, 0), own(80, 0), own(80, 3), own(80, 9)],
            shares,
        })
    }

    #[test]
    fn the_shares_of_the_fleet_are_those_of_the_rules_also_while_nothing_is_contended() {
        let share = TierFairness { tier: "gold".to_owned(), guarantee: 50, is_each: true, weight: 1_000 };
        let report =
            |tiers| fleet(Some(FleetSharesState { shares: vec![share.clone()], tiers, taken_back: 7 }));
        let calm = report(Vec::new());
        let names: Vec<_> = calm.tiers.iter().map(|tier| (tier.tier.as_str(), tier.guaranteed_to)).collect();
        assert_eq!(
            (calm.contended, calm.guaranteed, names),
            (false, 7, vec![("gold", "each"), ("other", "together")])
        );
        assert!((calm.tiers[0].guaranteed_percent - 5.0).abs() < 1e-9);
        let busy = TierState { tenants: 3, demand: 40.0, fair: Some(10.0), ..TierState::default() };
        let contended = report(vec![busy, TierState::default()]);
        assert_eq!(
            (contended.contended, contended.tiers[0].tenants, contended.tiers[0].fair_per_second),
            (true, 3, Some(10.0))
        );
    }

    /// A capacity sheds by priority, whether tenants share it or not.
    #[test]
    fn a_fleet_without_tenants_has_its_priorities() {
        let report = fleet(None);
        let rows: Vec<_> =
            report.priorities.iter().map(|row| (row.priority, row.capacity, row.shed)).collect();
        assert_eq!(
            rows,
            [("critical", 100, 0), ("important", 80, 0), ("normal", 80, 3), ("sheddable", 80, 9)]
        );
        assert!(!report.contended && report.tiers.is_empty());
    }
}
