//! The cost of telemetry: the limiter without and with it; and telemetry with every output failing (a full disk, 200
//! subscribers that do not read, a collector that accepts no spans) compared with telemetry without outputs.

use crate::contest::{fill, measure};
use crate::contestants::Contestant;
use crate::limiter::{Room, ThroughRules};
use crate::report::{at_most, heading, note, rows};
use crate::traffic::Law;
use std::sync::Arc;
use tollgate_observe::{Output, Telemetry, TelemetryConfig, resident_bytes};

/// How long to measure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Length {
    Full,
    Short,
}

const KEYS: u64 = 1_000;

pub(crate) fn run(length: Length) -> Result<(), String> {
    let (rounds, blocks) = match length {
        Length::Full => (15, 2_000),
        Length::Short => (7, 400),
    };
    let telemetry = |output, service_name| {
        let settings = TelemetryConfig { output, service_name, ..TelemetryConfig::default() };
        let observe = Telemetry::new(settings).map_err(|error| error.to_string())?;
        observe.start().map_err(|error| error.to_string())?;
        Ok::<Arc<Telemetry>, String>(observe)
    };
    let quiet = telemetry(None, None)?;
    let full = Output::File { path: "/dev/full".into(), bytes: 1 << 20, files: 2 };
    let broken = telemetry(Some(full), Some("bench".to_owned()))?;
    let _subscribers: Vec<_> = (0..200).filter_map(|_| broken.subscribe()).collect();
    let before = resident_bytes().unwrap_or(0);
    for room in [Room::Wide, Room::Tight] {
        let alone = ThroughRules::new(KEYS);
        let watched = ThroughRules::watched(KEYS, room, "with telemetry", &quiet);
        let failing = ThroughRules::watched(KEYS, room, "with telemetry, every output failing", &broken);
        let sampled = ThroughRules::watched(KEYS, room, "", &broken).sampled("the same, every trace sampled");
        let all: [&dyn Contestant; 4] = [&alone, &watched, &failing, &sampled];
        all.iter().for_each(|contestant| fill(*contestant, KEYS));
        let names: Vec<String> = all.iter().map(|contestant| contestant.name()).collect();
        for threads in [1, 2] {
            let what = if room == Room::Wide { "all allowed" } else { "denied with telemetry" };
            heading(&format!("{KEYS} keys, {what}, {threads} thread(s)"));
            let nanos = measure(&all, KEYS, Law::Uniform, threads, rounds, blocks);
            rows(&names, &nanos);
            if room == Room::Wide {
                at_most("nanoseconds that telemetry adds to a decision", nanos[1] - nanos[0], 15.0);
            }
            at_most("failing outputs ÷ none", nanos[2] / nanos[1], 1.05);
        }
    }
    let after = resident_bytes().unwrap_or(0);
    note(&format!("\nmemory: {} KiB before, {} KiB after", before / 1_024, after / 1_024));
    Ok(())
}
