//! The debug pages of envoyproxy/ratelimit and its Prometheus port.

use super::Service;
use crate::server::status::ServerStatus;
use crate::server::store::Store;
use hyper::StatusCode;
use std::fmt::Write;
use std::sync::Arc;
use tollgate_engine::Limiter;
use tollgate_observe::{ExpositionFormat, MetricsWriter, ProcessStatus};
use tollgate_rules::{Role, Ruleset};
use tollgate_server::http::{Page, Pages};

/// `/rlconfig`, `/stats`, and a list of both at every other path.
pub(crate) struct DebugPages {
    pub(crate) limiter: Arc<Limiter<Store>>,
    pub(crate) status: Arc<ServerStatus>,
    pub(crate) service: Arc<Service>,
}

impl Pages for DebugPages {
    fn page(&self, path: &str, _: &str) -> Page {
        let text = match path {
            "/rlconfig" => rules_text(&self.limiter.rules()),
            "/stats" => {
                let samples = self.service.metrics.samples(&self.status);
                samples.iter().fold(String::new(), |mut text, sample| {
                    let _ = writeln!(text, "{}: {}", sample.name, sample.value);
                    text
                })
            }
            _ => "/rlconfig: print out the currently loaded configuration for debugging\n/stats: print out stats\n"
                .to_owned(),
        };
        Page::text(StatusCode::OK, text)
    }
}

/// Lists the limits of all rules, as that service prints them.
fn rules_text(rules: &Ruleset) -> String {
    let mut text = String::new();
    for domain in rules.domains() {
        for (rule, levels) in domain.envoy_keys() {
            let mut key = domain.name().to_owned();
            for level in levels {
                key.push('.');
                key.push_str(&level.name);
            }
            let mut line = |unit: &str, count: u64, role: Option<Role>| {
                let (shadow, quota) = (role == Some(Role::Shadow), role == Some(Role::Quota));
                let _ = writeln!(
                    text,
                    "{key}: unit={unit} requests_per_unit={count}, shadow_mode: {shadow}, quota_mode: {quota}"
                );
            };
            if rule.limits.unlimited {
                line("UNKNOWN", 0, None);
            }
            for limit in rule.all_limits().filter(|limit| limit.role != Role::Candidate) {
                let unit = limit.unit.map_or("UNKNOWN", tollgate_rules::Unit::name);
                line(unit, limit.limit.rate().count, Some(limit.role));
            }
        }
    }
    text
}

/// The metrics, at one path.
pub(crate) struct MetricsPage {
    pub(crate) path: String,
    pub(crate) status: Arc<ServerStatus>,
    pub(crate) service: Arc<Service>,
}

impl Pages for MetricsPage {
    fn page(&self, path: &str, _: &str) -> Page {
        if path != self.path {
            return Page::text(StatusCode::NOT_FOUND, "404 page not found\n");
        }
        let format = ExpositionFormat::Prometheus;
        let mut page = MetricsWriter::new(format);
        self.service.metrics.write(&self.status, &mut page);
        self.status.metrics(&mut page);
        Page { status: StatusCode::OK, media_type: format.media_type(), text: page.finish() }
    }
}
