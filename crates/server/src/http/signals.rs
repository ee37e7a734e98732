//! `POST /v1/signals`: how a service is doing, for limits that follow it (`adapt` in the rules).

use super::problem::Problem;
use super::{App, body};
use http::StatusCode;
use serde::Deserialize;
use std::collections::BTreeMap;
use tollgate_core::CounterStore;
use tollgate_http::h1::RawResponse;

/// Most signals in one report.
const MAX_SIGNALS: usize = 64;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct SignalsRequest {
    domain: String,
    signals: BTreeMap<String, f64>,
}

pub(crate) fn record<S: CounterStore>(app: &App<S>, body: &[u8]) -> Result<RawResponse, Problem> {
    let request: SignalsRequest = body::decode(body)?;
    if request.signals.is_empty() || request.signals.len() > MAX_SIGNALS {
        return Err(Problem::bad(format!("write 1 to {MAX_SIGNALS} signals")).in_field("signals"));
    }
    let signals = request.signals.iter().map(|(name, value)| (name.as_str(), *value));
    let recorded = app.limiter.record_signals(&request.domain, signals);
    recorded.map_err(|error| Problem::bad(error.to_string()).in_field("signals"))?;
    let tiers = app.limiter.adapted_tiers();
    let own = tiers.iter().filter(|tier| tier.domain == request.domain);
    let percent: BTreeMap<&str, f64> = own.clone().map(|tier| (tier.tier.as_str(), tier.percent())).collect();
    let mut body = serde_json::json!({ "limits_percent": percent });
    let shadow: BTreeMap<&str, f64> =
        own.filter_map(|tier| Some((tier.tier.as_str(), tier.shadow_percent()?))).collect();
    if !shadow.is_empty() {
        body["shadow_percent"] = serde_json::json!(shadow);
    }
    Ok(RawResponse::json(StatusCode::OK, body.to_string()))
}
