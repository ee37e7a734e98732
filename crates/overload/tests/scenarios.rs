//! The scenarios that overload control is judged by, in virtual time: 16 workers of 40 ms (log-normal), so a capacity of 400
//! requests a second; four priorities; 50 tenants, one of which sends ten times its share; clients leave after a second. The
//! same settings everywhere.

mod simulation;

use simulation::{Fate, Run, Tenant, World, run};
use tollgate_core::conformance::SplitMix64;
use tollgate_overload::{GateConfig, GuaranteeScope, NO_TIER, POSITIONS, Priority, TierShare};

const CAPACITY: f64 = 400.0;
const SERVICE: f64 = 0.04;
const SIGMA: f64 = 0.5;
/// Critical, important, normal, sheddable.
const MIX: [f64; 4] = [0.15, 0.25, 0.4, 0.2];
const ENTERPRISE: usize = 5;
const PRO: usize = 10;
const GREEDY: usize = 49;

/// The settings of all scenarios.
fn settings(seed: u64) -> GateConfig {
    let each = |guarantee| TierShare { guarantee, scope: GuaranteeScope::Each, weight: 1.0 };
    let free = TierShare { guarantee: 0.1, scope: GuaranteeScope::Together, weight: 1.0 };
    GateConfig {
        tiers: vec![each(0.05), each(0.01), free],
        is_fair: true,
        key: seed,
        ..GateConfig::adaptive(16)
    }
}

/// Five enterprise tenants and ten pro tenants within their guarantees at three times the capacity; the rest is free.
fn tenants() -> Vec<Tenant> {
    let tenant = |n: usize| match n {
        n if n < ENTERPRISE => Tenant::new(0.75, 0),
        n if n < ENTERPRISE + PRO => Tenant::new(0.12, 1),
        GREEDY => Tenant::new(10.0, 2),
        _ => Tenant::new(1.0, 2),
    };
    (0..50).map(tenant).collect()
}

fn simulate(
    seed: u64,
    seconds: f64,
    load: &dyn Fn(f64) -> f64,
    service: &dyn Fn(f64, &mut SplitMix64) -> f64,
) -> Run {
    let gate = settings(seed);
    run(&World {
        seed,
        workers: 16,
        seconds,
        load,
        service,
        fails: &never,
        mix: MIX,
        tenants: &tenants(),
        callers: 20,
        gate,
    })
}

fn usual(_: f64, random: &mut SplitMix64) -> f64 {
    random.log_normal(SERVICE, SIGMA)
}

fn never(_: f64) -> bool {
    false
}

/// Runs a scenario with several seeds, on two threads.
fn each_seed(count: u64, scenario: impl Fn(u64) + Sync) {
    std::thread::scope(|scope| {
        for half in 0..2 {
            let scenario = &scenario;
            scope.spawn(move || (0..count).filter(|seed| seed % 2 == half).for_each(scenario));
        }
    });
}

fn is(priority: Priority) -> impl Fn(&simulation::Request) -> bool {
    move |request| request.priority == priority
}

#[test]
fn at_three_times_the_capacity_all_of_it_is_used_for_what_matters_most() {
    each_seed(20, |seed| {
        let load = |t| if (10.0..40.0).contains(&t) { 3.0 * CAPACITY } else { 0.5 * CAPACITY };
        let run = simulate(seed, 60.0, &load, &usual);
        assert!(run.shed(0.0, 10.0) == 0.0, "seed {seed}: nothing is shed before");
        let goodput = run.goodput(12.0, 40.0) / CAPACITY;
        assert!(goodput >= 0.97, "seed {seed}: goodput {goodput:.3}");
        let critical = run.served(10.0, 40.0, is(Priority::Critical));
        assert!(critical >= 0.994, "seed {seed}: critical {critical:.4}");
        for quantile in [0.5, 0.99] {
            let (unloaded, loaded) = (run.latency(0.0, 10.0, quantile), run.latency(12.0, 40.0, quantile));
            assert!(loaded <= 1.6 * unloaded, "seed {seed}: p{quantile} {loaded:.3} after {unloaded:.3}");
        }
        let parts = Priority::ALL.map(|priority| run.served(12.0, 40.0, is(priority)));
        assert!(parts[0] > parts[1] && parts[1] > parts[2] + 0.1, "seed {seed}: by priority {parts:?}");
        let guaranteed = run.served(10.0, 40.0, |request| request.tenant < ENTERPRISE + PRO);
        assert!(guaranteed >= 0.999, "seed {seed}: within guarantees {guaranteed:.4}");
        let greedy = run.served(12.0, 40.0, |request| request.tenant == GREEDY);
        let free = run.served(12.0, 40.0, |request| (15..GREEDY).contains(&request.tenant));
        assert!(greedy < free, "seed {seed}: the greedy tenant has {greedy:.3}, the others {free:.3}");
        assert!(run.shed(45.0, 59.0) == 0.0, "seed {seed}: back to normal within five seconds");
    });
}

/// 200 workers of 2 ms: where a hundred thousand complete in a second, the latency of a few of them is measured.
#[test]
fn a_fast_upstream_is_measured_by_samples() {
    each_seed(2, |seed| {
        const CAPACITY: f64 = 100_000.0;
        let gate = GateConfig { key: seed, ..GateConfig::adaptive(16) };
        let load = |t| if (4.0..10.0).contains(&t) { 2.0 * CAPACITY } else { 0.5 * CAPACITY };
        let service = |_, random: &mut SplitMix64| random.log_normal(0.002, SIGMA);
        let world = World {
            seed,
            workers: 200,
            seconds: 15.0,
            load: &load,
            service: &service,
            fails: &never,
            mix: MIX,
            tenants: &[Tenant::new(1.0, 0)],
            callers: 200,
            gate,
        };
        let run = run(&world);
        assert!(run.shed(1.0, 4.0) == 0.0, "seed {seed}: nothing is shed before");
        // The limit is found within four seconds, as it is if all of them are measured.
        let goodput = run.goodput(8.0, 10.0) / CAPACITY;
        assert!(goodput >= 0.97, "seed {seed}: goodput {goodput:.3}");
        let critical = run.served(4.0, 10.0, is(Priority::Critical));
        assert!(critical >= 0.994, "seed {seed}: critical {critical:.4}");
        let (unloaded, loaded) = (run.latency(1.0, 4.0, 0.5), run.latency(8.0, 10.0, 0.5));
        assert!(loaded <= 1.6 * unloaded, "seed {seed}: p50 {loaded:.4} after {unloaded:.4}");
        assert!(run.shed(12.0, 14.0) == 0.0, "seed {seed}: back to normal within two seconds");
    });
}

#[test]
fn no_critical_request_is_shed_while_sheddable_ones_pass() {
    each_seed(10, |seed| {
        // Without guarantees, which go before priorities.
        let gate = GateConfig { key: seed, ..GateConfig::adaptive(16) };
        let load = |t| if t < 5.0 { 0.5 * CAPACITY } else { 3.0 * CAPACITY };
        let all = [Tenant::new(1.0, 0)];
        let world = World {
            seed,
            workers: 16,
            seconds: 30.0,
            load: &load,
            service: &usual,
            fails: &never,
            mix: MIX,
            tenants: &all,
            callers: 20,
            gate,
        };
        let run = run(&world);
        for tenth in 60..290 {
            let (from, to) = (f64::from(tenth) / 10.0, f64::from(tenth) / 10.0 + 0.1);
            let critical =
                run.between(from, to).any(|one| is(Priority::Critical)(one) && one.fate == Fate::Shed);
            let sheddable = run.between(from, to).any(|one| is(Priority::Sheddable)(one) && one.is_good());
            assert!(!(critical && sheddable), "seed {seed}: at {from}");
        }
    });
}

#[test]
fn a_service_time_that_doubles_for_good_is_the_new_capacity_within_thirty_seconds() {
    each_seed(20, |seed| {
        let slow = |t, random: &mut SplitMix64| {
            random.log_normal(if t < 30.0 { SERVICE } else { 2.0 * SERVICE }, SIGMA)
        };
        let run = simulate(seed, 120.0, &|_| 0.7 * CAPACITY, &slow);
        assert!(run.shed(0.0, 30.0) == 0.0, "seed {seed}");
        let goodput = run.goodput(60.0, 118.0) / (CAPACITY / 2.0);
        assert!(goodput >= 0.95, "seed {seed}: goodput {goodput:.3}");
        let deviation = run.shed_deviation(60.0, 118.0);
        assert!(deviation <= 0.08, "seed {seed}: the shed part swings by {deviation:.3}");
        let critical = run.served(60.0, 118.0, is(Priority::Critical));
        assert!(critical >= 0.994, "seed {seed}: critical {critical:.4}");
    });
}

#[test]
fn the_base_line_does_not_rise_under_lasting_load() {
    each_seed(4, |seed| {
        let run = simulate(seed, 600.0, &|_| 3.0 * CAPACITY, &usual);
        let (early, late) = (run.latency(10.0, 60.0, 0.5), run.latency(540.0, 599.0, 0.5));
        assert!(late <= 1.1 * early, "seed {seed}: {early:.3} s, then {late:.3} s");
        let goodput = run.goodput(540.0, 599.0) / CAPACITY;
        assert!(goodput >= 0.97, "seed {seed}: {goodput:.3}");
    });
}

#[test]
fn noise_a_slow_endpoint_and_a_cold_start_shed_nothing() {
    each_seed(20, |seed| {
        let noisy = simulate(seed, 60.0, &|_| 0.6 * CAPACITY, &|_, random| random.log_normal(SERVICE, 1.0));
        assert!(noisy.shed(0.0, 59.0) <= 0.001, "seed {seed}: noise {}", noisy.shed(0.0, 59.0));
        // Every twentieth request takes ten times as long: the capacity is 276 a second.
        let slow = |_, random: &mut SplitMix64| {
            let factor = if random.fraction() < 0.05 { 10.0 } else { 1.0 };
            random.log_normal(SERVICE * factor, SIGMA)
        };
        let endpoint = simulate(seed, 60.0, &|_| 200.0, &slow);
        assert!(endpoint.shed(0.0, 59.0) == 0.0, "seed {seed}: slow endpoint");
        // The upstream is twice as slow for its first five seconds; load comes all at once.
        let warming = |t, random: &mut SplitMix64| {
            random.log_normal(if t < 5.0 { 2.0 * SERVICE } else { SERVICE }, SIGMA)
        };
        let cold = simulate(seed, 30.0, &|_| 0.45 * CAPACITY, &warming);
        assert!(cold.shed(0.0, 29.0) == 0.0, "seed {seed}: cold start");
        let busy = simulate(seed, 60.0, &|_| 0.9 * CAPACITY, &usual);
        assert!(busy.shed(0.0, 59.0) == 0.0, "seed {seed}: 90% from the start");
    });
}

#[test]
fn whatever_the_upstream_is_like_it_stays_useful() {
    // (workers, service time, floor): none of them is what the floor says.
    let upstreams = [(16, 0.04, 4), (200, 0.1, 16), (64, 0.01, 16), (400, 0.02, 8)];
    each_seed(8, |seed| {
        let (workers, service, floor) = upstreams[seed as usize % upstreams.len()];
        let capacity = workers as f64 / service;
        let gate = GateConfig { key: seed, ..GateConfig::adaptive(floor) };
        let service = |_, random: &mut SplitMix64| random.log_normal(service, SIGMA);
        let load = |t| if t < 10.0 { 0.5 * capacity } else { 3.0 * capacity };
        let tenants = tenants();
        let run = run(&World {
            seed,
            workers,
            seconds: 30.0,
            load: &load,
            service: &service,
            fails: &never,
            mix: MIX,
            tenants: &tenants,
            callers: 20,
            gate,
        });
        let goodput = run.goodput(15.0, 28.0) / capacity;
        assert!(goodput >= 0.94, "seed {seed}, {workers} workers: {goodput:.3}");
        let critical = run.served(15.0, 28.0, is(Priority::Critical));
        assert!(critical >= 0.98, "seed {seed}, {workers} workers: critical {critical:.4}");
        let slower = run.latency(15.0, 28.0, 0.5) / run.latency(0.0, 10.0, 0.5);
        assert!(slower <= 1.6, "seed {seed}, {workers} workers: p50 {slower:.2} times the unloaded one");
    });
}

#[test]
fn thousands_of_short_runs_keep_the_invariants() {
    each_seed(2000, |seed| {
        let mut random = SplitMix64::new(seed ^ 0x5eed);
        let workers = 1 + (random.fraction() * 40.0) as usize;
        let mean = 0.002 + 0.1 * random.fraction();
        let sigma = random.fraction() * 1.2;
        let capacity = workers as f64 / mean;
        let peaks: [f64; 4] = std::array::from_fn(|_| random.fraction() * 4.0);
        let slower = 0.5 + 2.0 * random.fraction();
        let load = |t: f64| (capacity * peaks[(t as usize).min(3)]).clamp(1.0, 2000.0);
        let service = |t: f64, random: &mut SplitMix64| {
            random.log_normal(if t < 2.0 { mean } else { mean * slower }, sigma)
        };
        let gate = GateConfig {
            tiers: settings(seed).tiers,
            is_fair: seed % 3 > 0,
            key: seed,
            ..GateConfig::adaptive(1 + (seed % 32) as u32)
        };
        let tenants = tenants();
        let run = run(&World {
            seed,
            workers,
            seconds: 4.0,
            load: &load,
            service: &service,
            fails: &never,
            mix: MIX,
            tenants: &tenants,
            callers: 20,
            gate,
        });
        // The upstream never holds more than the highest limit so far and its reserve.
        let mut most = 0;
        for (_, limit, threshold, in_flight) in &run.states {
            most = most.max(*limit);
            assert!(*in_flight <= most + most / 2 + 1, "seed {seed}: {in_flight} in flight, limit {most}");
            assert!(*threshold <= POSITIONS);
        }
        // Sheddable requests are not better off than the critical ones that arrive in the same half second.
        let (mut critical, mut worse) = (0.0, 0.0);
        for half in 0..8 {
            let (from, to) = (f64::from(half) / 2.0, f64::from(half + 1) / 2.0);
            let [most, least] = [Priority::Critical, Priority::Sheddable].map(|priority| {
                let all = run.between(from, to).filter(|one| is(priority)(one));
                let shed = all.clone().filter(|one| one.fate == Fate::Shed).count();
                (all.count() as f64, shed as f64)
            });
            if least.0 > 0.0 {
                critical += most.0;
                worse += most.1 - most.0 * least.1 / least.0;
            }
        }
        let worse = worse / critical;
        assert!(critical < 20.0 || worse <= 0.05, "seed {seed}: {worse:.3} of {critical} critical requests");
    });
}

#[test]
fn a_single_caller_at_ten_times_the_capacity_gets_all_of_it() {
    each_seed(4, |seed| {
        let tenants = [Tenant::new(1.0, NO_TIER)];
        let run = run(&World {
            seed,
            workers: 16,
            seconds: 60.0,
            load: &|_| 10.0 * CAPACITY,
            service: &usual,
            fails: &never,
            mix: [0.0, 0.0, 1.0, 0.0],
            tenants: &tenants,
            callers: 1,
            gate: GateConfig { key: seed, ..GateConfig::adaptive(4) },
        });
        let goodput = run.goodput(10.0, 58.0) / CAPACITY;
        assert!(goodput >= 0.95, "seed {seed}: {goodput:.3}");
    });
}

/// Runs an upstream at a part of its capacity, after three seconds of twice of it, behind a gate whose floor is far below
/// it.
fn simulate_low_floor(
    seed: u64,
    part: f64,
    service: &dyn Fn(f64, &mut SplitMix64) -> f64,
    fails: &dyn Fn(f64) -> bool,
) -> Run {
    run(&World {
        seed,
        workers: 16,
        seconds: 60.0,
        load: &|t| if t < 3.0 { 2.0 * CAPACITY } else { part * CAPACITY },
        service,
        fails,
        mix: MIX,
        tenants: &tenants(),
        callers: 20,
        gate: GateConfig { key: seed, ..GateConfig::adaptive(4) },
    })
}

#[test]
fn an_outage_with_fast_answers_does_not_keep_the_limit_down() {
    let is_outage = |t: f64| (10.0..20.0).contains(&t);
    let service = |t, random: &mut SplitMix64| if is_outage(t) { 0.0005 } else { usual(t, random) };
    each_seed(20, |seed| {
        let failing = simulate_low_floor(seed, 0.75, &service, &is_outage);
        let shed = failing.shed(20.0, 59.0);
        assert!(shed <= 0.001, "seed {seed}: {shed:.4} shed after failures, which show no latency");
        // The same with good answers, as from a cache: latency jumps for all numbers in flight.
        let cached = simulate_low_floor(seed, 0.75, &service, &never);
        let (all, late) = (cached.shed(20.0, 59.0), cached.shed(35.0, 59.0));
        assert!(
            all <= 0.2 && late <= 0.01,
            "seed {seed}: {all:.4} shed after latency is back, {late:.4} later"
        );
    });
}

#[test]
fn a_stall_is_over_within_six_seconds() {
    let service = |t: f64, random: &mut SplitMix64| {
        let stalled = if (10.0..20.0).contains(&t) { 20.0 - t } else { 0.0 };
        stalled + usual(t, random)
    };
    each_seed(20, |seed| {
        let run = simulate_low_floor(seed, 0.5, &service, &never);
        let shed = run.shed(26.0, 59.0);
        assert!(shed <= 0.001, "seed {seed}: {shed:.4} shed six seconds after the stall");
    });
}

/// Runs 20 tenants with five requests a second each, a quarter of the capacity, beside another that asks for more.
fn simulate_beside(seed: u64, other: Tenant) -> Run {
    let tenants: Vec<_> = (0..20).map(|_| Tenant::new(5.0, NO_TIER)).chain([other]).collect();
    run(&World {
        seed,
        workers: 16,
        seconds: 60.0,
        load: &|_| 100.0 + other.weight,
        service: &usual,
        fails: &never,
        mix: [0.0, 0.0, 1.0, 0.0],
        tenants: &tenants,
        callers: 1,
        gate: GateConfig { is_fair: true, key: seed, ..GateConfig::adaptive(16) },
    })
}

#[test]
fn tenants_far_below_their_fair_share_lose_nothing_to_a_greedy_one() {
    each_seed(20, |seed| {
        let run = simulate_beside(seed, Tenant::new(800.0, NO_TIER));
        let honest = run.served(2.0, 59.0, |request| request.tenant < 20);
        assert!(honest >= 0.99, "seed {seed}: {honest:.4} of the honest tenants' requests");
        let goodput = run.goodput(2.0, 59.0) / CAPACITY;
        assert!(goodput >= 0.97, "seed {seed}: goodput {goodput:.3}");
    });
}

#[test]
fn a_new_name_for_each_request_takes_nothing_from_known_tenants() {
    each_seed(20, |seed| {
        let run = simulate_beside(seed, Tenant { has_new_names: true, ..Tenant::new(400.0, NO_TIER) });
        let honest = run.served(2.0, 59.0, |request| request.tenant < 20);
        assert!(honest >= 0.99, "seed {seed}: {honest:.4} of the honest tenants' requests");
    });
}
