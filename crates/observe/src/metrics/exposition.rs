//! Prometheus exposition: metrics as text in the Prometheus format or OpenMetrics. Everything that has metrics writes them
//! into a [`MetricsWriter`]; no other module knows the syntax.
//!
//! OpenMetrics differs in three points: the family of a counter is named without `_total`, the text ends with `# EOF`, and
//! bucket bounds are fractions.

use std::fmt::{Display, Write};

/// Text format of the exposition.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ExpositionFormat {
    /// The Prometheus text format, version 0.0.4.
    #[default]
    Prometheus,
    /// OpenMetrics 1.0.0.
    OpenMetrics,
}

impl ExpositionFormat {
    /// Selects the format for an `Accept` header.
    #[must_use]
    pub fn accepted(accept: &str) -> Self {
        // A wildcard does not ask for OpenMetrics by name, so it selects the Prometheus format.
        let open = quality(accept, &["application/openmetrics-text"]).filter(|quality| *quality > 0.0);
        let plain = quality(accept, &["text/plain", "text/*", "*/*"]);
        if open.is_some() && open >= plain { Self::OpenMetrics } else { Self::Prometheus }
    }

    /// Returns the media type.
    #[must_use]
    pub const fn media_type(self) -> &'static str {
        match self {
            Self::Prometheus => "text/plain; version=0.0.4; charset=utf-8",
            Self::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
        }
    }
}

/// Returns the quality from 0 to 1 of the first of `ranges` that `accept` names; `None` if it names none of them.
fn quality(accept: &str, ranges: &[&str]) -> Option<f32> {
    let quality_of = |range: &&str| {
        let offers = accept.split(',').filter_map(|offer| {
            let mut parts = offer.split(';').map(str::trim);
            let is_it = parts.next()?.eq_ignore_ascii_case(range);
            let weight = parts.filter_map(|part| part.split_once('=')).find_map(|(name, value)| {
                name.trim().eq_ignore_ascii_case("q").then(|| value.trim().parse().unwrap_or(0.0))
            });
            is_it.then(|| weight.unwrap_or(1.0_f32).clamp(0.0, 1.0))
        });
        offers.reduce(f32::max)
    };
    ranges.iter().find_map(quality_of)
}

/// Type of a metric family.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum MetricKind {
    Counter,
    Gauge,
    Histogram,
}

/// Writer of metrics in one text format.
///
/// ```
/// use tollgate_observe::{ExpositionFormat, MetricsWriter};
/// let mut page = MetricsWriter::new(ExpositionFormat::Prometheus);
/// page.counters("shop_orders_total", "Orders.").add(&[("by", "card")], 3);
/// assert_eq!(page.finish(), "# HELP shop_orders_total Orders.\n# TYPE shop_orders_total counter\nshop_orders_total{by=\"card\"} 3\n");
/// ```
#[derive(Debug)]
pub struct MetricsWriter {
    format: ExpositionFormat,
    text: String,
}

impl MetricsWriter {
    /// Creates an empty writer.
    #[must_use]
    pub const fn new(format: ExpositionFormat) -> Self {
        Self { format, text: String::new() }
    }

    /// Returns the complete text.
    #[must_use]
    pub fn finish(mut self) -> String {
        if self.format == ExpositionFormat::OpenMetrics {
            self.text.push_str("# EOF\n");
        }
        self.text
    }

    /// Writes a counter without labels. Its name must end in `_total`.
    pub fn counter(&mut self, name: &str, help: &str, value: u64) {
        self.counters(name, help).add(&[], value);
    }

    /// Writes a gauge without labels.
    pub fn gauge(&mut self, name: &str, help: &str, value: impl Display) {
        self.gauges(name, help).add(&[], value);
    }

    /// Starts a family of counters.
    pub fn counters<'p>(&'p mut self, name: &'p str, help: &str) -> MetricFamily<'p> {
        self.family(name, MetricKind::Counter, help)
    }

    /// Starts a family of gauges.
    pub fn gauges<'p>(&'p mut self, name: &'p str, help: &str) -> MetricFamily<'p> {
        self.family(name, MetricKind::Gauge, help)
    }

    /// Starts a family of histograms.
    pub fn histograms<'p>(&'p mut self, name: &'p str, help: &str) -> MetricFamily<'p> {
        self.family(name, MetricKind::Histogram, help)
    }

    fn family<'p>(&'p mut self, name: &'p str, kind: MetricKind, help: &str) -> MetricFamily<'p> {
        let family = match (self.format, kind) {
            (ExpositionFormat::OpenMetrics, MetricKind::Counter) => {
                name.strip_suffix("_total").unwrap_or(name)
            }
            _ => name,
        };
        let word = match kind {
            MetricKind::Counter => "counter",
            MetricKind::Gauge => "gauge",
            MetricKind::Histogram => "histogram",
        };
        let _ = writeln!(self.text, "# HELP {family} {}\n# TYPE {family} {word}", one_line(help));
        MetricFamily { writer: self, name }
    }
}

/// A metric family: the samples of one name.
#[derive(Debug)]
pub struct MetricFamily<'p> {
    writer: &'p mut MetricsWriter,
    name: &'p str,
}

impl MetricFamily<'_> {
    /// Writes one sample.
    pub fn add(&mut self, labels: &[(&str, &str)], value: impl Display) {
        self.sample("", labels, None, value);
    }

    /// Writes a histogram; `counts` has one more entry than `bounds`, for values above all of them.
    pub fn histogram(&mut self, labels: &[(&str, &str)], bounds: &[f64], counts: &[u64], sum: f64) {
        let mut below = 0;
        for (at, count) in counts.iter().enumerate() {
            below += count;
            let bound = match bounds.get(at) {
                Some(bound) if bound.fract() == 0.0 => format!("{bound:.1}"),
                Some(bound) => bound.to_string(),
                None => "+Inf".to_owned(),
            };
            self.sample("_bucket", labels, Some(&bound), below);
        }
        self.sample("_sum", labels, None, sum);
        self.sample("_count", labels, None, below);
    }

    fn sample(&mut self, suffix: &str, labels: &[(&str, &str)], bound: Option<&str>, value: impl Display) {
        let text = &mut self.writer.text;
        let _ = write!(text, "{}{suffix}", self.name);
        let all = labels.iter().copied().chain(bound.map(|bound| ("le", bound)));
        let mut before = "{";
        for (label, value) in all {
            let _ = write!(text, "{before}{label}=\"{}\"", escaped(value));
            before = ",";
        }
        if before == "," {
            text.push('}');
        }
        let _ = writeln!(text, " {value}");
    }
}

/// Escapes a HELP text. Quotes are kept: only one of the formats escapes them, so no HELP text may contain any.
fn one_line(text: &str) -> String {
    text.replace('\\', "\\\\").replace('\n', "\\n")
}

/// Escapes a label value.
fn escaped(text: &str) -> String {
    text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_formats_are_as_their_specifications_have_them() {
        let write = |format| {
            let mut page = MetricsWriter::new(format);
            page.counter("a_total", "As.", 1);
            page.gauges("b", "Bs.").add(&[("c", "x\"y\\z\n")], 0.5);
            page.histograms("d_seconds", "Ds.").histogram(&[("f", "g")], &[0.5, 1.0], &[1, 2, 3], 4.5);
            page.finish()
        };
        let rest = "# HELP b Bs.\n# TYPE b gauge\nb{c=\"x\\\"y\\\\z\\n\"} 0.5\n# HELP d_seconds Ds.\n# TYPE d_seconds histogram\n\
                    d_seconds_bucket{f=\"g\",le=\"0.5\"} 1\nd_seconds_bucket{f=\"g\",le=\"1.0\"} 3\n\
                    d_seconds_bucket{f=\"g\",le=\"+Inf\"} 6\nd_seconds_sum{f=\"g\"} 4.5\nd_seconds_count{f=\"g\"} 6\n";
        assert_eq!(
            write(ExpositionFormat::Prometheus),
            format!("# HELP a_total As.\n# TYPE a_total counter\na_total 1\n{rest}")
        );
        assert_eq!(
            write(ExpositionFormat::OpenMetrics),
            format!("# HELP a As.\n# TYPE a counter\na_total 1\n{rest}# EOF\n")
        );
    }

    #[test]
    fn readers_get_what_they_accept() {
        let prometheus =
            "application/openmetrics-text;version=1.0.0;q=0.6,text/plain;version=0.0.4;q=0.5,*/*;q=0.1";
        for accept in [
            prometheus,
            "application/openmetrics-text",
            "APPLICATION/OpenMetrics-Text ; version=1.0.0 ; Q=0.2 , text/plain;q=0.1",
            "application/openmetrics-text,text/plain;q=0.5",
            "application/openmetrics-text,*/*",
            "text/plain;q=0,application/openmetrics-text;q=0.001",
        ] {
            assert_eq!(ExpositionFormat::accepted(accept), ExpositionFormat::OpenMetrics, "{accept}");
        }
        for accept in [
            "",
            "*/*",
            "text/plain",
            "application/*",
            "application/openmetrics-text;q=0",
            "application/openmetrics-text;q=0,*/*",
            "application/openmetrics-text;q=0.4,text/plain;version=0.0.4;q=0.5",
            "text/plain,application/openmetrics-text;q=0.9",
            "application/openmetrics-text;q=0.5,*/*;q=0.8",
            "application/openmetrics-text;q=x",
            "application/openmetrics-textual",
        ] {
            assert_eq!(ExpositionFormat::accepted(accept), ExpositionFormat::Prometheus, "{accept}");
        }
    }
}
