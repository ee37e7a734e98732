//! Reports of overload control: metrics, the node's status, and the audit of adapted limits.

use super::audit_pace::{AuditPace, Entry};
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::mpsc;
use tollgate_control::{Actor, AdaptationRecord, AdaptationStep, ControlPlane};
use tollgate_core::{Clock, Priority, SystemClock};
use tollgate_engine::{
    AdaptationState, CheckLoadState, FleetShedCount, FleetState, Limiter, POSITIONS, ShedOrder, SignalState,
    UpstreamState,
};
use tollgate_observe::MetricsWriter;

/// Steps of adapted limits that wait for the database at most; a domain makes one in seconds.
const MAX_STEPS: usize = 1_024;
/// Time until a step that the database did not take is tried again.
const RETRY: Duration = Duration::from_secs(5);

/// Writes the steps of adapted limits to the audit log, at the pace of [`AuditPace`], for as long as it is polled.
pub(crate) fn audit_steps<S>(
    limiter: &Limiter<S>,
    control: Arc<ControlPlane>,
    node: String,
) -> impl Future<Output = ()> + use<S> {
    let (sender, mut steps) = mpsc::channel(MAX_STEPS);
    limiter.on_adapted(move |step| {
        if sender.try_send(step).is_err() {
            tracing::error!("step of adapted limits not audited: too many wait for the database");
        }
    });
    async move {
        let actor = Actor { name: "overload/adapt".to_owned(), origin: node };
        let (mut pace, clock) = (AuditPace::default(), SystemClock::new());
        loop {
            let due = pace.next_due();
            let later = async {
                match due {
                    Some(due) => tokio::time::sleep(due.since(clock.now()).into()).await,
                    None => std::future::pending().await,
                }
            };
            let entries = tokio::select! {
                step = steps.recv() => match step {
                    Some(step) => pace.add(step, clock.now()).into_iter().collect(),
                    None => return,
                },
                () = later => pace.take_due(clock.now()),
            };
            for entry in entries {
                audit(&control, entry, &actor).await;
            }
        }
    }
}

/// Writes an entry to the audit log, as soon as the database takes it.
async fn audit(control: &ControlPlane, entry: Entry, actor: &Actor) {
    let percent = |thousandths: u32| f64::from(thousandths) / 10.0;
    let Some((_, first)) = entry.steps.first() else { return };
    let record = AdaptationRecord {
        domain: first.domain.clone(),
        tier: first.tier.clone(),
        from: percent(entry.from),
        steps: entry
            .steps
            .into_iter()
            .map(|(at, step)| AdaptationStep { at, percent: percent(step.to), signal: step.signal })
            .collect(),
    };
    while let Err(error) = control.audit_adaptation(&record, actor).await {
        tracing::warn!(%error, "step of adapted limits not audited yet");
        tokio::time::sleep(RETRY).await;
    }
}

/// Returns the part of the order of shedding that is served: 1 if nothing is shed, 0 if everything is.
fn served(state: &UpstreamState) -> f64 {
    f64::from(state.gate.threshold) / f64::from(POSITIONS)
}

/// Writes the metrics of all upstreams with a limit of requests in flight.
pub(crate) fn metrics(states: &[UpstreamState], page: &mut MetricsWriter) {
    if states.is_empty() {
        return;
    }
    type Read = fn(&UpstreamState) -> f64;
    let gauges: [(&str, &str, Read); 7] = [
        ("ratelimit_overload_limit", "Limit of requests in flight to the upstream.", |state| {
            state.gate.limit.into()
        }),
        ("ratelimit_overload_in_flight", "Requests in flight to the upstream.", |state| {
            state.gate.in_flight.into()
        }),
        ("ratelimit_overload_waiting", "Requests that wait for a place in flight.", |state| {
            state.gate.waiting.into()
        }),
        (
            "ratelimit_overload_threshold",
            "Part of the order of shedding (critical to sheddable) that is served: 1 if nothing is shed.",
            served,
        ),
        ("ratelimit_overload_demand", "Requests per second that arrive for the upstream.", |state| {
            state.gate.demand
        }),
        (
            "ratelimit_overload_capacity",
            "Requests per second that the upstream has shown to serve.",
            |state| state.gate.throughput,
        ),
        ("ratelimit_overload_base_latency_seconds", "Latency of the upstream without queueing.", |state| {
            state.gate.base_latency.unwrap_or(0.0)
        }),
    ];
    for (name, help, read) in gauges {
        let mut family = page.gauges(name, help);
        for state in states {
            family.add(&[("domain", &state.domain), ("upstream", &state.upstream)], read(state));
        }
    }
    let mut family = page.counters(
        "ratelimit_overload_requests_total",
        "Requests for upstreams with a limit in flight, by priority and result: admitted, shed, or would be shed (shadow).",
    );
    for state in states {
        for priority in Priority::ALL {
            let (domain, upstream) = (state.domain.as_str(), state.upstream.as_str());
            let counted = [
                ("admitted", &state.gate.admitted),
                ("shed", &state.gate.shed),
                ("shadow", &state.gate.shadowed),
            ];
            for (result, counts) in counted {
                let labels = [
                    ("domain", domain),
                    ("upstream", upstream),
                    ("priority", priority.name()),
                    ("result", result),
                ];
                family.add(&labels, counts[priority.index()]);
            }
        }
    }
}

/// Writes the number of requests that the fleet's capacity has shed, and of those that guarantees admitted although it was in use.
pub(crate) fn fleet_metrics(counts: &[FleetShedCount], states: &[FleetState], page: &mut MetricsWriter) {
    let shared: Vec<_> =
        states.iter().filter_map(|state| Some((&state.domain, state.shares.as_ref()?.taken_back))).collect();
    if !shared.is_empty() {
        let help = "Requests that a guarantee admitted while the fleet's capacity was in use.";
        let mut family = page.counters("ratelimit_overload_fleet_guaranteed_total", help);
        for (domain, taken_back) in shared {
            family.add(&[("domain", domain)], taken_back);
        }
    }
    if counts.is_empty() {
        return;
    }
    let help = "Requests that the fleet's capacity has shed, by priority.";
    let mut family = page.counters("ratelimit_overload_fleet_shed_total", help);
    for shed in counts {
        family.add(&[("domain", &shed.domain), ("priority", shed.priority.name())], shed.count);
    }
    let is_shadow = |shed: &FleetShedCount| {
        shed.shadow > 0 || states.iter().any(|state| state.is_shadow && state.domain == shed.domain)
    };
    let shadow: Vec<_> = counts.iter().filter(|shed| is_shadow(shed)).collect();
    if shadow.is_empty() {
        return;
    }
    let help = "Requests that the fleet's capacity would have shed, but for shadow mode, by priority.";
    let mut family = page.counters("ratelimit_overload_fleet_would_shed_total", help);
    for shed in shadow {
        family.add(&[("domain", &shed.domain), ("priority", shed.priority.name())], shed.shadow);
    }
}

/// Writes the metrics of limits that follow signals.
pub(crate) fn signal_metrics(states: &[AdaptationState], page: &mut MetricsWriter) {
    if states.is_empty() {
        return;
    }
    type Read = fn(&SignalState) -> f64;
    let gauges: [(&str, &str, Read); 2] = [
        ("ratelimit_overload_signal", "Highest value of a signal that limits follow, of late.", |signal| {
            signal.value
        }),
        (
            "ratelimit_overload_signal_bound",
            "Value of a signal above which limits are tightened.",
            |signal| signal.bound,
        ),
    ];
    for (name, help, read) in gauges {
        let mut family = page.gauges(name, help);
        for state in states {
            for signal in &state.signals {
                let labels =
                    [("domain", state.domain.as_str()), ("signal", &signal.name), ("source", signal.source)];
                family.add(&labels, read(signal));
            }
        }
    }
}

/// Writes the metrics of checks that wait for the store.
pub(crate) fn check_metrics(state: &CheckLoadState, page: &mut MetricsWriter) {
    page.gauge("ratelimit_checks_pending", "Number of checks that wait for the store.", state.pending);
    let help = "Mean time that checks waited for the store, of late, in seconds.";
    page.gauge("ratelimit_check_wait_seconds", help, state.wait);
    let help = "Mean wait of checks above which they are shed by class, in seconds.";
    page.gauge("ratelimit_check_wait_target_seconds", help, state.target);
    let help = "Part of the checks of a class that goes without the store because this node is overloaded.";
    let mut family = page.gauges("ratelimit_checks_shed_part", help);
    for class in ShedOrder::ALL {
        family.add(&[("class", class.name())], state.shed_part[class as usize]);
    }
    let help = "Number of checks decided without the store because this node was overloaded, by their highest class that was.";
    let mut family = page.counters("ratelimit_checks_shed_total", help);
    for class in ShedOrder::ALL {
        family.add(&[("class", class.name())], state.shed[class as usize]);
    }
}

/// Returns the state of all upstreams as JSON.
pub(crate) fn states_json(states: &[UpstreamState]) -> Value {
    let by_priority = |counts: &[u64; 4]| {
        let named =
            Priority::ALL.map(|priority| (priority.name().to_owned(), json!(counts[priority.index()])));
        Value::Object(named.into_iter().collect())
    };
    let one = |state: &UpstreamState| {
        let names = state.shares.iter().map(|share| share.tier.as_str()).chain(["other"]);
        let tiers: Vec<Value> = names
            .zip(&state.gate.tiers)
            .map(|(tier, own)| json!({"tier": tier, "demand_per_second": own.demand}))
            .collect();
        json!({
            "domain": state.domain,
            "upstream": state.upstream,
            "shadow": state.gate.is_shadow,
            "limit": state.gate.limit,
            "in_flight": state.gate.in_flight,
            "waiting": state.gate.waiting,
            "threshold": served(state),
            "demand_per_second": state.gate.demand,
            "capacity_per_second": state.gate.throughput,
            "base_latency_ms": state.gate.base_latency.map(|seconds| seconds * 1e3),
            "admitted": by_priority(&state.gate.admitted),
            "shed": by_priority(&state.gate.shed),
            "would_be_shed": by_priority(&state.gate.shadowed),
            "tiers": tiers,
        })
    };
    states.iter().map(one).collect()
}
