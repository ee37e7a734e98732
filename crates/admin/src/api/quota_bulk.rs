//! Bulk quota import and export as NDJSON. Both stream: neither holds the whole file in memory.

use crate::auth::{Operator, Viewer};
use crate::error::{ApiResult, control_problem};
use crate::query::{ConfirmParameter, StrictQuery};
use crate::quota_guard::{LinesToConfirm, QuotaGuard};
use crate::response::json_response;
use crate::{AdminState, body, ndjson};
use axum::body::Body;
use axum::extract::State;
use bytes::BytesMut;
use http::StatusCode;
use http_body_util::BodyExt;
use serde::Serialize;
use std::sync::Arc;
use std::time::Duration;
use tollgate_control::{ControlError, Import, ImportLine, ImportReport, KeyHash, Quota};
use tollgate_http::json_request::decode;
use tollgate_http::problem::Problem;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

pub(crate) const IMPORT: &str = "/admin/v1/quotas/import";
/// Maximum duration of an import.
pub(crate) const TIME_LIMIT: Duration = Duration::from_secs(6 * 3_600);
/// Maximum time without data from the client during an import.
const READ_TIMEOUT: Duration = Duration::from_secs(30);
/// Maximum length of a line, in bytes.
const MAX_LINE: usize = 64 * 1024;

pub(crate) fn routes() -> OpenApiRouter<Arc<AdminState>> {
    OpenApiRouter::new().routes(routes!(import)).routes(routes!(export))
}

/// Imports quotas from NDJSON, one per line: a QuotaSpec with an api_key, or a line of an export. If a line needs
/// confirmation, nothing is written from there on, and the response is 409.
#[utoipa::path(post, path = "/admin/v1/quotas/import", operation_id = "POST_quotas_import",
    params(ConfirmParameter),
    request_body(content((Option<String> = "application/x-ndjson"), (Option<String> = "text/plain"))),
    responses((status = 200, description = "The import report.", body = ImportReport)),
    extensions(("x-role" = json!("operator"))))]
async fn import(
    State(admin): State<Arc<AdminState>>,
    Operator(actor): Operator,
    StrictQuery(confirm): StrictQuery<ConfirmParameter>,
    body: Body,
) -> ApiResult {
    let Some(mut import) = Import::begin(admin.control()?, (admin.rules)(), actor) else {
        body::discard(body).await;
        let detail = "another import is running on this node; retry when it has finished";
        return Err(Problem::new(StatusCode::CONFLICT, "Import already running", detail).into());
    };
    let guard = if confirm.is_confirmed() { None } else { Some(QuotaGuard::new(&admin)?) };
    let mut lines = GuardedImport { import: &mut import, guard, needs_confirm: LinesToConfirm::default() };
    let read = import_body(&mut lines, body).await;
    let needs_confirm = lines.needs_confirm;
    let imported = match read {
        Ok(()) if !needs_confirm.is_empty() => {
            let _ = import.abort().await;
            return Err(needs_confirm.problem(import.imported()).into());
        }
        Ok(()) => import.finish().await.map_err(control_problem),
        Err(problem) => {
            // Discards lines that are batched but not yet written, so that it is clear which lines took effect.
            let _ = import.abort().await;
            Err(problem)
        }
    };
    let imported = imported.map_err(|problem| {
        let detail = format!(
            "{}; the first {} valid lines took effect, and it is safe to send the file again",
            problem.detail,
            import.imported()
        );
        Problem { detail, ..problem }
    })?;
    Ok(json_response(StatusCode::OK, &imported))
}

/// A running import, and the lines that need confirmation.
struct GuardedImport<'i> {
    import: &'i mut Import,
    /// Absent if the import is confirmed.
    guard: Option<QuotaGuard<'i>>,
    needs_confirm: LinesToConfirm,
}

async fn import_body(import: &mut GuardedImport<'_>, mut body: Body) -> Result<(), Problem> {
    let mut buffer = BytesMut::new();
    let mut line = 0;
    // Whether the beginning of the current line has been discarded.
    let mut too_long = false;
    while let Some(frame) =
        tokio::time::timeout(READ_TIMEOUT, body.frame()).await.map_err(|_| read_timed_out())?
    {
        let frame = frame.map_err(|error| Problem::bad(format!("cannot read the request body: {error}")))?;
        let Ok(data) = frame.into_data() else { continue };
        buffer.extend_from_slice(&data);
        while let Some(end) = buffer.iter().position(|byte| *byte == b'\n') {
            let sent = buffer.split_to(end + 1).freeze();
            line += 1;
            if std::mem::take(&mut too_long) || end > MAX_LINE {
                reject_long_line(import.import, line);
            } else {
                one(import, line, &sent[..end]).await?;
            }
        }
        if buffer.len() > MAX_LINE {
            buffer.clear();
            too_long = true;
        }
    }
    line += 1;
    if too_long {
        reject_long_line(import.import, line);
        return Ok(());
    }
    one(import, line, &buffer.freeze()).await
}

async fn one(lines: &mut GuardedImport<'_>, line: u64, sent: &[u8]) -> Result<(), Problem> {
    if sent.trim_ascii().is_empty() {
        return Ok(());
    }
    let read = match decode::<ImportLine>(sent) {
        Ok(read) => read,
        Err(error) => {
            lines.import.reject_line(line, error.detail, error.place);
            return Ok(());
        }
    };
    if let Some(guard) = lines.guard.as_ref().filter(|_| !read.confirm) {
        // An invalid line is reported as such by the import.
        let reasons = guard.line_reasons(&read).await.unwrap_or_default();
        if let Some(first) = reasons.into_iter().next() {
            lines.needs_confirm.add(line, &first);
        }
    }
    // From the first such line on nothing more is written; the rest is read to list all of them.
    if lines.needs_confirm.is_empty() {
        lines.import.line(line, sent, read).await.map_err(control_problem)?;
    }
    Ok(())
}

fn reject_long_line(import: &mut Import, line: u64) {
    import.reject_line(line, format!("line is longer than {MAX_LINE} bytes"), None);
}

fn read_timed_out() -> Problem {
    let detail = format!("no data received for {} s", READ_TIMEOUT.as_secs());
    Problem::new(StatusCode::REQUEST_TIMEOUT, "Body too slow", detail)
}

/// One line of an export.
#[derive(Serialize)]
struct Exported<'a> {
    #[serde(flatten)]
    quota: &'a Quota,
    /// The installation in which the quota's id is valid.
    installation: &'a str,
}

/// Exports all quotas as NDJSON.
#[utoipa::path(get, path = "/admin/v1/quotas/export", operation_id = "GET_quotas_export",
    responses((status = 200, description = "One quota per line, with the installation in which its id is valid.", body = String,
        content_type = "application/x-ndjson")),
    extensions(("x-role" = json!("viewer"))))]
async fn export(State(admin): State<Arc<AdminState>>, _: Viewer) -> ApiResult {
    let control = Arc::clone(admin.control()?);
    let installation = control.installation_id();
    let next = move |after: Option<KeyHash>| {
        let (control, installation) = (Arc::clone(&control), installation.clone());
        async move {
            let quotas = control.export(after).await?;
            let last = quotas.last().and_then(|quota| KeyHash::parse(&quota.id));
            let mut text = Vec::with_capacity(quotas.len() * 256);
            for quota in &quotas {
                ndjson::write(&mut text, &Exported { quota, installation: &installation });
            }
            Ok::<_, ControlError>(last.map(|last| (text, Some(last))))
        }
    };
    Ok(ndjson::reply("quotas.ndjson", None, next).await?)
}
