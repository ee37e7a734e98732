//! Consumption endpoint: `GET /admin/v1/consumption`, what callers consumed of billed rules, in pages of JSON or as
//! NDJSON.

use super::decisions::time;
use crate::auth::Viewer;
use crate::error::ApiResult;
use crate::query::{Number, StrictQuery, parsed};
use crate::response::json_response;
use crate::{AdminState, ndjson};
use axum::extract::State;
use http::header::ACCEPT;
use http::{HeaderMap, StatusCode};
use serde::{Deserialize, Deserializer};
use std::sync::Arc;
use tollgate_control::{
    CallerRef, ConsumptionCursor, ConsumptionFilter, ConsumptionPage, ControlPlane, Granularity, KeyHash,
};
use tollgate_core::Timestamp;
use tollgate_http::problem::Problem;
use utoipa::IntoParams;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

/// Maximum number of rows per page.
const MAX_ROWS: u64 = 1_000;
/// Maximum length of a caller, a rule or a domain, in bytes.
const MAX_TEXT: usize = 1_024;
const NDJSON: &str = "application/x-ndjson";

pub(crate) fn routes() -> OpenApiRouter<Arc<AdminState>> {
    OpenApiRouter::new().routes(routes!(read))
}

/// Format of the response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Format {
    Json,
    Ndjson,
}

#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
struct ConsumptionParameters {
    /// Only periods that begin at this time or later, such as 2027-01-31T00:00:00Z [default: a day ago, or the current
    /// month].
    #[serde(default, deserialize_with = "time")]
    #[param(value_type = Option<String>)]
    from: Option<Timestamp>,
    /// Only periods that begin before this time [default: now].
    #[serde(default, deserialize_with = "time")]
    #[param(value_type = Option<String>)]
    to: Option<Timestamp>,
    /// Length of the periods: `hour` or `month`, both in UTC [default: hour].
    #[serde(default, deserialize_with = "granularity")]
    #[param(value_type = Option<String>, pattern = "^(hour|month)?$")]
    granularity: Option<Granularity>,
    /// Only this caller: its value, such as an API key or a tenant, or its `caller_id`.
    caller: Option<String>,
    /// Only the rule with this name.
    rule: Option<String>,
    /// Only rules of this domain.
    domain: Option<String>,
    /// `next_cursor` of the previous page.
    #[serde(default, deserialize_with = "cursor")]
    #[param(value_type = Option<String>)]
    cursor: Option<ConsumptionCursor>,
    /// Maximum number of rows per page, up to 1000 [default: 100]. NDJSON has no pages.
    #[param(value_type = Option<String>, pattern = "^([1-9][0-9]{0,17})?$")]
    limit: Option<Number<MAX_ROWS>>,
    /// `json`, or `ndjson` for all rows, one per line [default: as `Accept` says, else json].
    #[serde(default, deserialize_with = "format")]
    #[param(value_type = Option<String>, pattern = "^(json|ndjson)?$")]
    format: Option<Format>,
}

/// Returns what callers consumed of billed rules, by hour or month.
///
/// Each row has an `id` that stays the same and a `version` that grows with every change: store rows by id, and keep the
/// higher version.
#[utoipa::path(get, path = "/admin/v1/consumption", operation_id = "GET_consumption", params(ConsumptionParameters),
    responses((status = 200, description = "A page of rows, in the order of their start; or all of them, one per line.",
        content((ConsumptionPage = "application/json"), (String = "application/x-ndjson")))),
    extensions(("x-role" = json!("viewer"))))]
async fn read(
    State(admin): State<Arc<AdminState>>,
    _: Viewer,
    StrictQuery(of): StrictQuery<ConsumptionParameters>,
    headers: HeaderMap,
) -> ApiResult {
    let control = Arc::clone(admin.control()?);
    for (name, text) in [("caller", &of.caller), ("rule", &of.rule), ("domain", &of.domain)] {
        if text.as_ref().is_some_and(|text| text.len() > MAX_TEXT || text.contains('\0')) {
            let detail = format!("must have at most {MAX_TEXT} bytes and no NUL");
            return Err(Problem::bad(detail).in_field(name).into());
        }
    }
    let accepts = headers.get(ACCEPT).is_some_and(|types| types.as_bytes().starts_with(NDJSON.as_bytes()));
    let is_ndjson = of.format.map_or(accepts, |format| format == Format::Ndjson);
    let limit = of.limit.map_or(if is_ndjson { MAX_ROWS } else { 100 }, |limit| limit.0);
    let filter = filter(&control, of, limit);
    let first = filter.after.clone();
    if !is_ndjson {
        return Ok(json_response(StatusCode::OK, &control.consumption(&filter).await?));
    }
    let next = move |after: Option<Option<ConsumptionCursor>>| {
        let (control, filter) = (Arc::clone(&control), filter.clone());
        async move {
            let Some(after) = after else { return Ok(None) };
            let page = control.consumption(&ConsumptionFilter { after, ..filter }).await?;
            let mut text = Vec::new();
            page.rows.iter().for_each(|row| ndjson::write(&mut text, row));
            let next = page.next_cursor.as_deref().and_then(ConsumptionCursor::parse);
            Ok(Some((text, next.map(Some))))
        }
    };
    Ok(ndjson::reply("consumption.ndjson", Some(first), next).await?)
}

fn filter(control: &ControlPlane, of: ConsumptionParameters, limit: u64) -> ConsumptionFilter {
    let seconds = |at: Timestamp| i64::try_from(at.as_micros() / 1_000_000).unwrap_or(i64::MAX);
    let granularity = of.granularity.unwrap_or_default();
    let now = seconds(control.now());
    let from = of.from.map_or_else(
        || match granularity {
            Granularity::Hour => Granularity::Hour.start(now - 86_400),
            Granularity::Month => Granularity::Month.start(now),
        },
        // A period that has begun before is not complete.
        |from| seconds(Timestamp::from_micros(from.as_micros().saturating_add(999_999))),
    );
    let caller = of.caller.as_deref().map(|caller| match KeyHash::parse(caller) {
        Some(id) => id,
        None => control.caller_hash(CallerRef::Key(caller)),
    });
    ConsumptionFilter {
        granularity,
        from,
        to: of.to.map_or(now.saturating_add(1), seconds),
        caller,
        rule: of.rule,
        domain: of.domain,
        after: of.cursor,
        limit: usize::try_from(limit).unwrap_or(usize::MAX),
    }
}

fn granularity<'de, D: Deserializer<'de>>(text: D) -> Result<Option<Granularity>, D::Error> {
    let all = [Granularity::Hour, Granularity::Month];
    parsed(text, "must be hour or month", |text| all.into_iter().find(|one| one.name() == text)).map(Some)
}

fn format<'de, D: Deserializer<'de>>(text: D) -> Result<Option<Format>, D::Error> {
    parsed(text, "must be json or ndjson", |text| match text {
        "json" => Some(Format::Json),
        "ndjson" => Some(Format::Ndjson),
        _ => None,
    })
    .map(Some)
}

fn cursor<'de, D: Deserializer<'de>>(text: D) -> Result<Option<ConsumptionCursor>, D::Error> {
    parsed(text, "must be the next_cursor of a page", ConsumptionCursor::parse).map(Some)
}
