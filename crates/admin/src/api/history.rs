//! History endpoint: `GET /admin/v1/history` returns what all requests, a rule or a caller did in a range of time, in
//! steps that suit the range, summed over all nodes, with what made it up.

use super::decisions::time;
use crate::AdminState;
use crate::auth::Viewer;
use crate::error::ApiResult;
use crate::query::{StrictQuery, parsed};
use crate::response::compact_json;
use axum::extract::State;
use serde::{Deserialize, Deserializer, Serialize};
use std::sync::Arc;
use tollgate_control::{HistoryOf, HistoryRank, HistorySeries, history_step};
use tollgate_core::Timestamp;
use tollgate_http::problem::Problem;
use tollgate_observe::rfc3339;
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

pub(crate) fn routes() -> OpenApiRouter<Arc<AdminState>> {
    OpenApiRouter::new().routes(routes!(history))
}

/// Range without `from`, in seconds.
const DAY: i64 = 86_400;
/// The longest range, in seconds: ten years.
const MAX_RANGE: i64 = 3_650 * DAY;
/// Callers or rules that are listed.
const LISTED: i64 = 20;

#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
struct HistoryParameters {
    /// Start of the range; a day before its end if absent.
    #[serde(default, deserialize_with = "time")]
    #[param(value_type = Option<String>)]
    from: Option<Timestamp>,
    /// End of the range, exclusive; now if absent.
    #[serde(default, deserialize_with = "time")]
    #[param(value_type = Option<String>)]
    to: Option<Timestamp>,
    /// Domain of the rule.
    domain: Option<String>,
    /// A rule, by name; with `domain`.
    rule: Option<String>,
    /// A caller, by its `key_id`.
    #[serde(default, deserialize_with = "caller_id")]
    #[param(value_type = Option<String>)]
    caller: Option<u64>,
}

#[derive(Serialize, ToSchema)]
struct History {
    /// Start of the first step.
    from: String,
    /// End of the range.
    to: String,
    /// Length of a step, in seconds.
    step_s: i64,
    /// Days that history is kept; 0 if this node records none.
    days: u32,
    /// The caller as lists show it, if it is known.
    #[schema(required = true)]
    key_masked: Option<String>,
    series: HistorySeries,
    /// The busiest callers, the most denied callers of the rule, or the rules that denied the caller.
    top: Vec<HistoryRank>,
}

/// Returns the history of all requests, of a rule or of a caller.
#[utoipa::path(get, path = "/admin/v1/history", operation_id = "GET_history", params(HistoryParameters),
    responses((status = 200, description = "The history.", body = History)),
    extensions(("x-role" = json!("viewer"))))]
async fn history(
    State(admin): State<Arc<AdminState>>,
    _: Viewer,
    StrictQuery(asked): StrictQuery<HistoryParameters>,
) -> ApiResult {
    let control = admin.control()?;
    let now = admin.telemetry()?.now();
    let seconds = |at: Timestamp| i64::try_from(at.as_secs()).unwrap_or(i64::MAX);
    let to = seconds(asked.to.unwrap_or(now));
    let from = asked.from.map_or(to.saturating_sub(DAY), seconds);
    if from >= to || to.saturating_sub(from) > MAX_RANGE {
        return Err(Problem::bad("must be before `to`, by at most ten years").in_field("from").into());
    }
    let of = match (asked.domain, asked.rule, asked.caller) {
        (None, None, None) => HistoryOf::All,
        (Some(domain), Some(rule), None) => HistoryOf::Rule(domain, rule),
        (None, None, Some(caller)) => HistoryOf::Caller(caller),
        (Some(domain), Some(rule), Some(caller)) => HistoryOf::CallerAtRule(caller, domain, rule),
        (None, Some(_), _) => return Err(Problem::bad("is required with `rule`").in_field("domain").into()),
        (Some(_), None, _) => return Err(Problem::bad("is required with `domain`").in_field("rule").into()),
    };
    let step = history_step(from, to, seconds(now));
    let series = control.history(&of, from, to, step).await?;
    let top = control.history_top(&of, from, to, LISTED).await?;
    let key_masked = match asked.caller {
        Some(caller) => control.history_caller(caller).await?,
        None => None,
    };
    let first = series.t.first().copied().unwrap_or(from);
    let shown = |seconds: i64| rfc3339(Timestamp::from_secs(seconds.unsigned_abs()));
    Ok(compact_json(&History {
        from: shown(first),
        to: shown(to),
        step_s: step,
        days: admin.history_days,
        key_masked,
        series,
        top,
    }))
}

fn caller_id<'de, D: Deserializer<'de>>(text: D) -> Result<Option<u64>, D::Error> {
    let id = |text: &str| {
        let is_id = matches!(text.len(), 16 | 64) && text.bytes().all(|digit| digit.is_ascii_hexdigit());
        u64::from_str_radix(text.get(..16)?, 16).ok().filter(|id| is_id && *id != 0)
    };
    parsed(text, "must be a caller's key_id: 16 hexadecimal digits", id).map(Some)
}
