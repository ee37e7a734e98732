//! Audit log endpoints: `GET /admin/v1/audit` lists entries, newest first; `/export` streams all of them in order.

use super::decisions::time;
use crate::auth::Administrator;
use crate::error::ApiResult;
use crate::query::{Number, StrictQuery};
use crate::response::json_response;
use crate::{AdminState, ndjson};
use axum::extract::State;
use http::StatusCode;
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use tollgate_control::{AuditEntry, AuditFilter};
use tollgate_core::Timestamp;
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

const MAX_ENTRIES: u64 = 1_000;

pub(crate) fn routes() -> OpenApiRouter<Arc<AdminState>> {
    OpenApiRouter::new().routes(routes!(list)).routes(routes!(export))
}

/// Sequence number of an audit entry.
type Seq = Number<{ i64::MAX as u64 }>;

#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
struct PageParameters {
    /// Return entries before this sequence number.
    #[param(value_type = Option<String>, pattern = "^([1-9][0-9]{0,17})?$")]
    before: Option<Seq>,
    /// Maximum number of entries, up to 1000.
    #[param(value_type = Option<String>, pattern = "^([1-9][0-9]{0,17})?$")]
    limit: Option<Number<MAX_ENTRIES>>,
    /// Name of the principal that made the change.
    actor: Option<String>,
    /// Action, such as `quota.put`, or its first word: `quota`.
    action: Option<String>,
    /// First characters of the target.
    target: Option<String>,
    /// Earliest time.
    #[serde(default, deserialize_with = "time")]
    #[param(value_type = Option<String>)]
    from: Option<Timestamp>,
    /// Latest time.
    #[serde(default, deserialize_with = "time")]
    #[param(value_type = Option<String>)]
    to: Option<Timestamp>,
}

#[derive(Serialize, ToSchema)]
struct AuditPage {
    entries: Vec<AuditEntry>,
    #[schema(required = true)]
    next_before: Option<i64>,
}

/// Lists audit entries, newest first.
#[utoipa::path(get, path = "/admin/v1/audit", operation_id = "GET_audit", params(PageParameters),
    responses((status = 200, description = "A page of entries.", body = AuditPage)),
    extensions(("x-role" = json!("admin"))))]
async fn list(
    State(admin): State<Arc<AdminState>>,
    _: Administrator,
    StrictQuery(page): StrictQuery<PageParameters>,
) -> ApiResult {
    let (before, limit) = (page.before.map(Number::signed), page.limit.map_or(100, Number::signed));
    let millis = |at: Timestamp| i64::try_from(at.as_micros() / 1_000).unwrap_or(i64::MAX);
    let filter = AuditFilter {
        actor: page.actor,
        action: page.action,
        target: page.target,
        from: page.from.map(millis),
        to: page.to.map(millis),
    };
    let is_filtered = filter.actor.is_some()
        || filter.action.is_some()
        || filter.target.is_some()
        || filter.from.is_some()
        || filter.to.is_some();
    let entries = admin.control()?.audit_matching(&filter, before, limit).await?;
    // The chain is without gaps, so an unfiltered list goes on until the first entry.
    let is_last = if is_filtered { (entries.len() as u64) < limit.unsigned_abs() } else { false };
    let next_before = entries.last().map(|entry| entry.seq).filter(|seq| *seq > 1 && !is_last);
    Ok(json_response(StatusCode::OK, &AuditPage { entries, next_before }))
}

#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
struct ExportParameters {
    /// Return only entries after this sequence number.
    #[param(value_type = Option<String>, pattern = "^([1-9][0-9]{0,17})?$")]
    after: Option<Seq>,
}

/// Exports audit entries in order, as NDJSON.
///
/// Pass the last exported `seq` as `after` to fetch only new entries.
#[utoipa::path(get, path = "/admin/v1/audit/export", operation_id = "GET_audit_export", params(ExportParameters),
    responses((status = 200, description = "One entry per line.", body = String, content_type = "application/x-ndjson")),
    extensions(("x-role" = json!("admin"))))]
async fn export(
    State(admin): State<Arc<AdminState>>,
    _: Administrator,
    StrictQuery(from): StrictQuery<ExportParameters>,
) -> ApiResult {
    let after = from.after.map_or(0, Number::signed);
    let control = Arc::clone(admin.control()?);
    let next = move |after: i64| {
        let control = Arc::clone(&control);
        async move {
            let entries = control.audit_after(after).await?;
            let mut text = Vec::new();
            entries.iter().for_each(|entry| ndjson::write(&mut text, entry));
            Ok(entries.last().map(|last| (text, last.seq)))
        }
    };
    Ok(ndjson::reply("audit.ndjson", after, next).await?)
}
