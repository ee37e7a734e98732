//! Decodes `overload.adapt`: signals with their sources, and the tiers whose limits follow them.

use super::overload::percent;
use crate::overload::Adapt;
use crate::reader::{Reader, Spanned, scalar};
use crate::signal::{Signal, SignalSource, UpstreamMeasure};
use crate::yaml::{Position, YamlNode, YamlValue, shorten};
use tollgate_core::TimeDelta;

/// Most signals, and most tiers.
const MOST: usize = 256;
/// Shortest time between two steps.
const MIN_STEP: TimeDelta = TimeDelta::from_secs(1);
/// Most signals that are queried: a process asks for one after the other.
const MAX_QUERIES: usize = 32;
/// Most bytes of a query.
const MAX_QUERY: usize = 4_096;
const KEYS: [&str; 4] = ["above", "measure", "upstream", "query"];

/// A measure that needs a limit of requests in flight, where it is written.
pub(super) struct NeedsWorkers {
    at: Position,
    measure: UpstreamMeasure,
}

pub(super) fn read(
    reader: &mut Reader<'_>,
    node: &YamlNode<'_>,
    needs_workers: &mut Option<NeedsWorkers>,
) -> Option<Adapt> {
    const EXAMPLE: &str = "{signals: {queue_depth: 100}, order: [free, pro], least: 20%}";
    let mut adapt =
        Adapt { signals: Vec::new(), order: Vec::new(), least: 200, step: TimeDelta::from_secs(5) };
    let mut has_error = false;
    for (key, node) in reader.mapping(node, "adapt", EXAMPLE)? {
        match scalar(key) {
            "signals" => {
                for (key, node) in reader.mapping(node, "signals", "{queue_depth: 100}")? {
                    let Some(signal) = signal(reader, scalar(key), node) else {
                        has_error = true;
                        continue;
                    };
                    if let SignalSource::Measured { measure, .. } = signal.source
                        && measure.needs_limit()
                    {
                        needs_workers.get_or_insert(NeedsWorkers { at: node.at, measure });
                    }
                    adapt.signals.push(signal);
                }
            }
            "order" => {
                for item in reader.sequence(node, "order", "[free, pro, enterprise]")? {
                    let tier = reader.text(item, "order", "free")?;
                    if adapt.order.contains(&tier.value) {
                        reader.error_help(tier.at, "a tier is listed twice", "keep one of them");
                    }
                    adapt.order.push(tier.value);
                }
            }
            "least" => {
                let least = percent(reader, node, "least")?;
                if least == 0 {
                    reader.error_help(
                        node.at,
                        "`least: 0%` would leave callers nothing",
                        "write 0.1% to 100%, as in `least: 20%`",
                    );
                    has_error = true;
                }
                adapt.least = least;
            }
            "step" => {
                let step = reader.duration(node, "step")?;
                if step.value < MIN_STEP {
                    reader.error_help(
                        step.at,
                        format!("`step: {}` is shorter than a second", step.value),
                        "write a second or more, as in `step: 5s`",
                    );
                    has_error = true;
                }
                adapt.step = step.value;
            }
            _ => reader.unknown_key(key, "`adapt`", &["signals", "order", "least", "step"]),
        }
    }
    if has_error {
        return None;
    }
    let missing = match (adapt.signals.is_empty(), adapt.order.is_empty()) {
        (false, false) => None,
        (true, _) => Some("no `signals`"),
        (false, true) => Some("no `order` of tiers"),
    };
    if let Some(missing) = missing {
        let message = format!("`adapt` has {missing}");
        reader.error_help(node.at, message, format!("write `adapt: {EXAMPLE}`"));
        return None;
    }
    if adapt.signals.len() > MOST || adapt.order.len() > MOST {
        reader.error(node.at, format!("`adapt` has at most {MOST} signals, and at most {MOST} tiers"));
        return None;
    }
    let queries = adapt.signals.iter().filter(|signal| matches!(signal.source, SignalSource::Query(_)));
    if queries.count() > MAX_QUERIES {
        reader.error(node.at, format!("`signals` has at most {MAX_QUERIES} with a `query`"));
        return None;
    }
    Some(adapt)
}

/// Decodes a signal: its bound alone, or with its source.
fn signal(reader: &mut Reader<'_>, name: &str, node: &YamlNode<'_>) -> Option<Signal> {
    if !matches!(node.value, YamlValue::Mapping(_)) {
        let above = bound(reader, node, name, name)?;
        return Some(Signal { name: name.to_owned(), above, source: SignalSource::Pushed });
    }
    let example = "{above: 300, measure: upstream_p99_ms}";
    let (mut above, mut measured, mut upstream, mut query) = (None, None, None, None);
    for (key, node) in reader.mapping(node, name, example)? {
        match scalar(key) {
            "above" => above = Some(bound(reader, node, name, "above")?),
            "measure" => measured = Some(measure(reader, node)?),
            "upstream" => upstream = Some(reader.text(node, "upstream", "billing")?),
            "query" => query = Some(promql(reader, node)?),
            _ => reader.unknown_key(key, "a signal", &KEYS),
        }
    }
    let Some(above) = above else {
        reader.error_help(
            node.at,
            format!("`{}` has no `above`", shorten(name)),
            format!("write the value above which limits are tightened, as in `{name}: {example}`"),
        );
        return None;
    };
    if let (None, Some(Spanned { at, .. })) = (&measured, &upstream) {
        reader.error_help(
            *at,
            "`upstream` belongs to a `measure`",
            "add `measure: upstream_p99_ms`, or leave it out",
        );
        return None;
    }
    let source = match (measured, query) {
        (None, None) => SignalSource::Pushed,
        (Some(measure), None) => {
            SignalSource::Measured { measure, upstream: upstream.map(|upstream| upstream.value) }
        }
        (None, Some(query)) => SignalSource::Query(query),
        (Some(_), Some(_)) => {
            reader.error_help(
                node.at,
                format!("`{}` has two sources, `measure` and `query`", shorten(name)),
                "keep one of them, or write two signals",
            );
            return None;
        }
    };
    Some(Signal { name: name.to_owned(), above, source })
}

/// Decodes the value above which limits are tightened.
fn bound(reader: &mut Reader<'_>, node: &YamlNode<'_>, name: &str, key: &str) -> Option<f64> {
    let Spanned { at, value } = reader.text(node, key, "100")?;
    let bound = value.parse::<f64>().ok().filter(|bound| bound.is_finite() && *bound > 0.0);
    if bound.is_none() {
        reader.error_help(
            at,
            format!("`{key}: {}` is no positive number", shorten(&value)),
            format!("write the value above which limits are tightened, as in `{name}: 100`"),
        );
    }
    bound
}

fn measure(reader: &mut Reader<'_>, node: &YamlNode<'_>) -> Option<UpstreamMeasure> {
    let Spanned { at, value } = reader.text(node, "measure", "upstream_p99_ms")?;
    let measure = UpstreamMeasure::from_name(&value);
    if measure.is_none() {
        reader.unknown_value(at, "measure", &value, &UpstreamMeasure::ALL.map(UpstreamMeasure::name));
    }
    measure
}

fn promql(reader: &mut Reader<'_>, node: &YamlNode<'_>) -> Option<String> {
    let Spanned { at, value } = reader.text(node, "query", "sum(queue_messages)")?;
    if value.trim().is_empty() || value.len() > MAX_QUERY {
        reader.error_help(
            at,
            format!("a query has 1 to {MAX_QUERY} bytes"),
            "write it as Prometheus takes it, as in `query: sum(queue_messages)`",
        );
        return None;
    }
    Some(value)
}

impl NeedsWorkers {
    /// Reports that there is no limit.
    pub(super) fn report(&self, reader: &mut Reader<'_>) {
        reader.error_help(
            self.at,
            format!("{} needs a limit of requests in flight, and there is no `workers`", self.measure.name()),
            "add `workers: {limit: adaptive}` to `overload`, or measure upstream_in_flight",
        );
    }
}
