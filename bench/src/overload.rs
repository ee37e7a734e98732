//! Overload: an upstream that gets more than it can serve, without protection, behind Envoy, and behind Tollgate.
//!
//! Every subject gets the same load before an upstream of its own, with the same settings in all scenarios. Several subjects
//! run at a time, which leaves most of two cores idle: what is measured is tens of milliseconds. The report says how late
//! requests were sent; a p99 of more than a few milliseconds means that the machine was busy with something else.

mod clients;
mod figures;
mod subjects;
mod workers;

use clients::{Phase, Sent};
use figures::Span;
use std::path::Path;
use subjects::Subject;
use workers::{CAPACITY, ServiceTime};

/// How long to measure.
#[derive(Clone, Copy)]
pub(crate) enum Length {
    Short,
    Full,
}

const USUAL: ServiceTime = ServiceTime { sigma: 0.5, slow_part: 0.0 };
const NOISY: ServiceTime = ServiceTime { sigma: 1.0, slow_part: 0.0 };
/// A twentieth of the requests takes ten times as long, so the capacity is 276 a second.
const ONE_SLOW: ServiceTime = ServiceTime { sigma: 0.5, slow_part: 0.05 };
/// Seconds in which an upstream that has just started is slower, and how many times.
const COLD: f64 = 5.0;
const COLD_SLOWER: f64 = 2.0;
/// Index of the priority.
const CRITICAL: usize = 0;
/// Seconds that are not measured after the load has risen, and after the service time has.
const SETTLE: f64 = 2.0;
const LEARN: f64 = 30.0;

struct Scenario {
    title: &'static str,
    phases: Vec<Phase>,
    service: ServiceTime,
    /// Prints what is measured.
    measure: fn(&[Phase], &[Sent]) -> Vec<Figure>,
}

/// A figure, and its bar.
struct Figure {
    name: &'static str,
    /// `None` if there is none, as with the latency of what was never served.
    value: Option<f64>,
    bar: Option<Bar>,
}

#[derive(Clone, Copy)]
enum Bar {
    AtLeast(f64),
    AtMost(f64),
}

impl Bar {
    fn is_reached(self, value: Option<f64>) -> bool {
        match (self, value) {
            (Self::AtLeast(bar), Some(value)) => value >= bar,
            (Self::AtMost(bar), Some(value)) => value <= bar,
            (_, None) => false,
        }
    }
}

fn scenarios(length: Length) -> Vec<Scenario> {
    let (calm, surge, after, doubled, noise) = match length {
        Length::Short => (6.0, 15.0, 9.0, LEARN + 15.0, 15.0),
        Length::Full => (15.0, 30.0, 15.0, LEARN + 45.0, 40.0),
    };
    let phase = |seconds, load, slower| Phase { seconds, load, slower };
    vec![
        Scenario {
            title: "load 0.5 → 3 → 0.5 × capacity",
            phases: vec![phase(calm, 0.5, 1.0), phase(surge, 3.0, 1.0), phase(after, 0.5, 1.0)],
            service: USUAL,
            measure: measure_surge,
        },
        Scenario {
            title: "service time doubles for good at 0.7 × capacity",
            phases: vec![phase(calm, 0.7, 1.0), phase(doubled, 0.7, 2.0)],
            service: USUAL,
            measure: measure_doubled,
        },
        Scenario {
            title: "noisy latency (sigma 1) at 0.6 × capacity",
            phases: vec![phase(noise, 0.6, 1.0)],
            service: NOISY,
            measure: |phases, sent| {
                let all = Span::new(sent, 0.0, phases[0].seconds);
                vec![figure("wrongly shed", all.unserved(), Bar::AtMost(0.001))]
            },
        },
        Scenario {
            title: "one endpoint in twenty requests ten times as slow, at 0.72 × capacity",
            phases: vec![phase(noise, 0.5, 1.0)],
            service: ONE_SLOW,
            measure: measure_unshed,
        },
        Scenario {
            title: "cold start: twice as slow for 5 s, at 0.9 × of that at once",
            phases: vec![phase(COLD, 0.45, COLD_SLOWER), phase(noise - COLD, 0.45, 1.0)],
            service: USUAL,
            measure: measure_unshed,
        },
    ]
}

/// Measures what was shed although the capacity was enough for all.
fn measure_unshed(phases: &[Phase], sent: &[Sent]) -> Vec<Figure> {
    let all = Span::new(sent, 0.0, phases.iter().map(|phase| phase.seconds).sum());
    vec![
        figure("shed", all.refused(), Bar::AtMost(0.0)),
        figure("not served in time", all.unserved(), None),
        figure("p50 of served, ms", all.latency(0.5), None),
    ]
}

fn figure(name: &'static str, value: impl Into<Option<f64>>, bar: impl Into<Option<Bar>>) -> Figure {
    Figure { name, value: value.into(), bar: bar.into() }
}

fn measure_surge(phases: &[Phase], sent: &[Sent]) -> Vec<Figure> {
    let (begin, end) = (phases[0].seconds, phases[0].seconds + phases[1].seconds);
    let unloaded = Span::new(sent, 0.0, begin);
    let (surge, settled) = (Span::new(sent, begin, end), Span::new(sent, begin + SETTLE, end));
    let after = Span::new(sent, end, end + phases[2].seconds);
    let [p50, p99] = [0.5, 0.99].map(|part| (settled.latency(part), unloaded.latency(part)));
    let ratio = |(loaded, unloaded): (Option<f64>, Option<f64>)| Some(loaded? / unloaded?);
    vec![
        figure("goodput ÷ capacity", settled.goodput() / CAPACITY, Bar::AtLeast(0.97)),
        figure("critical served", surge.served(CRITICAL), Bar::AtLeast(0.994)),
        figure("important served", settled.served(1), None),
        figure("normal served", settled.served(2), None),
        figure("sheddable served", settled.served(3), None),
        figure("within guarantees served", surge.guaranteed_served(), Bar::AtLeast(0.999)),
        figure("p50 of served, ms", p50.0, None),
        figure("p99 of served, ms", p99.0, None),
        figure("p50 ÷ unloaded", ratio(p50), Bar::AtMost(1.6)),
        figure("p99 ÷ unloaded", ratio(p99), Bar::AtMost(1.6)),
        figure("sd of shed ratio", settled.shed_deviation(), None),
        figure("goodput ÷ load afterwards", after.goodput() / (phases[2].load * CAPACITY), None),
        figure("back to normal after, s", after.back_to_normal(), Bar::AtMost(5.0)),
    ]
}

fn measure_doubled(phases: &[Phase], sent: &[Sent]) -> Vec<Figure> {
    let (begin, end) = (phases[0].seconds, phases[0].seconds + phases[1].seconds);
    let learned = Span::new(sent, begin + LEARN, end);
    vec![
        figure("goodput ÷ new capacity", learned.goodput() * phases[1].slower / CAPACITY, Bar::AtLeast(0.95)),
        figure("sd of shed ratio", learned.shed_deviation(), Bar::AtMost(0.08)),
        figure("critical served", learned.served(CRITICAL), None),
        figure("p50 of served, ms", learned.latency(0.5), None),
        figure("p99 of served, ms", learned.latency(0.99), None),
        figure("wrongly shed before", Span::new(sent, 0.0, begin).unserved(), None),
    ]
}

/// Runs the comparison, or one subject alone; needs the server's binary and, for its part, Envoy.
pub(crate) fn run(length: Length, only: Option<&str>) -> Result<(), String> {
    let all = match length {
        Length::Short => Subject::SHORT.to_vec(),
        Length::Full => Subject::ALL.to_vec(),
    };
    let chosen: Vec<Subject> =
        all.iter().copied().filter(|subject| only.is_none_or(|only| only == subject.name())).collect();
    if chosen.is_empty() {
        let names: Vec<&str> = all.iter().map(|subject| subject.name()).collect();
        return Err(format!("unknown subject; there are: {}", names.join(", ")));
    }
    let at_once = match length {
        Length::Short => chosen.len(),
        Length::Full => 2,
    };
    let folder = std::env::temp_dir().join(format!("tollgate-bench-{}", std::process::id()));
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .map_err(|error| error.to_string())?;
    println!("{}", subjects::describe());
    let mut missed = Vec::new();
    for scenario in scenarios(length) {
        let mut measured: Vec<(Subject, Vec<Figure>, f64)> = Vec::new();
        for wave in waves(&chosen, at_once) {
            let sent = runtime.block_on(together(&scenario, wave, &folder))?;
            measured.extend(wave.iter().zip(sent).map(|(subject, sent)| {
                let late = Span::new(&sent, 0.0, f64::INFINITY).lateness();
                (*subject, (scenario.measure)(&scenario.phases, &sent), late)
            }));
        }
        print(&scenario, &measured);
        for (subject, figures, _) in measured.iter().filter(|(subject, ..)| subject.is_ours()) {
            let below = figures.iter().filter(|one| one.bar.is_some_and(|bar| !bar.is_reached(one.value)));
            missed.extend(below.map(|one| format!("{}: {}: {}", scenario.title, subject.name(), one.name)));
        }
    }
    match (chosen.iter().any(|subject| subject.is_ours()), missed.is_empty()) {
        (false, _) => println!("no bars: they are for Tollgate's own subjects"),
        (true, true) => println!("all bars reached"),
        (true, false) => println!("MISSED:\n- {}", missed.join("\n- ")),
    }
    std::fs::remove_dir_all(&folder).or_else(|error| match error.kind() {
        std::io::ErrorKind::NotFound => Ok(()),
        _ => Err(error.to_string()),
    })
}

/// Returns the subjects that run at the same time. If they cannot all be in full waves, the first ones are fewer: that is the
/// upstream without protection, and no subject that is compared with another has the machine to itself.
fn waves(chosen: &[Subject], at_once: usize) -> impl Iterator<Item = &[Subject]> {
    let (first, others) = chosen.split_at(chosen.len() % at_once);
    Some(first).filter(|first| !first.is_empty()).into_iter().chain(others.chunks(at_once))
}

/// Runs a scenario with some subjects at the same time.
async fn together(scenario: &Scenario, wave: &[Subject], folder: &Path) -> Result<Vec<Vec<Sent>>, String> {
    const SEED: u64 = 20;
    let mut running = Vec::new();
    for subject in wave {
        running.push(subject.start(folder, scenario.service, SEED).await?);
    }
    let sending: Vec<_> = running
        .iter()
        .map(|one| {
            let (address, workers) = (one.address, one.upstream.workers.clone());
            let phases = scenario.phases.clone();
            tokio::spawn(async move {
                clients::send(address, &phases, SEED, |phase| workers.slow_down(phase.slower)).await
            })
        })
        .collect();
    let mut sent = Vec::new();
    for one in sending {
        sent.push(one.await.map_err(|error| error.to_string())?);
    }
    Ok(sent)
}

/// Prints a table: a column for each subject, and the bar.
fn print(scenario: &Scenario, measured: &[(Subject, Vec<Figure>, f64)]) {
    crate::report::heading(scenario.title);
    let names: Vec<&str> = measured.iter().map(|(subject, ..)| subject.name()).collect();
    println!("| | {} | bar |", names.join(" | "));
    println!("|---|{}---:|", "---:|".repeat(names.len()));
    let Some((_, first, _)) = measured.first() else { return };
    for (at, one) in first.iter().enumerate() {
        let values: Vec<String> = measured
            .iter()
            .map(|(subject, figures, _)| {
                let value = figures[at].value.map_or_else(|| "–".to_owned(), shown);
                let is_missed = subject.is_ours()
                    && figures[at].bar.is_some_and(|bar| !bar.is_reached(figures[at].value));
                if is_missed { format!("{value} MISSED") } else { value }
            })
            .collect();
        let bar = match one.bar {
            Some(Bar::AtLeast(bar)) => format!("≥ {bar}"),
            Some(Bar::AtMost(bar)) => format!("≤ {bar}"),
            None => String::new(),
        };
        println!("| {} | {} | {bar} |", one.name, values.join(" | "));
    }
    let late: Vec<String> = measured.iter().map(|(_, _, late)| format!("{late:.1}")).collect();
    println!("| p99 of sent late, ms | {} | |\n", late.join(" | "));
}

fn shown(value: f64) -> String {
    if value >= 10.0 { format!("{value:.0}") } else { format!("{value:.4}") }
}
