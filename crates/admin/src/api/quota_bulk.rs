//! Many quotas at once, one a line: sent in, or handed out. Neither is ever held whole in memory.

use crate::auth::{Operator, Viewer};
use crate::error::{ApiResult, control_problem};
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
use tollgate_http::body::decode;
use tollgate_http::problem::Problem;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

pub(crate) const IMPORT: &str = "/admin/v1/quotas/import";
/// How long an import may take as a whole.
pub(crate) const TIME_LIMIT: Duration = Duration::from_secs(6 * 3_600);
/// How long whoever sends one may keep silent.
const READ_TIMEOUT: Duration = Duration::from_secs(30);
/// The longest line, in bytes.
const MAX_LINE: usize = 64 * 1024;

pub(crate) fn routes() -> OpenApiRouter<Arc<AdminState>> {
    OpenApiRouter::new().routes(routes!(import)).routes(routes!(export))
}

/// Many at once, one JSON text a line: a QuotaDraft with an api_key, or a line of an export.
#[utoipa::path(post, path = "/admin/v1/quotas/import", operation_id = "POST_quotas_import",
    request_body(content((Option<String> = "application/x-ndjson"), (Option<String> = "text/plain"))),
    responses((status = 200, description = "What was asked for.", body = ImportReport)),
    extensions(("x-role" = json!("operator"))))]
async fn import(State(admin): State<Arc<AdminState>>, Operator(actor): Operator, body: Body) -> ApiResult {
    let Some(mut import) = Import::begin(admin.control()?, (admin.rules)(), actor) else {
        body::discard(body).await;
        let detail = "another import is under way here: wait for its end";
        return Err(Problem::new(StatusCode::CONFLICT, "Import already running", detail).into());
    };
    let imported = match import_body(&mut import, body).await {
        Ok(()) => import.finish().await.map_err(control_problem),
        Err(problem) => {
            // What is gathered and not yet written is left out, so that it is clear which lines act.
            let _ = import.abort().await;
            Err(problem)
        }
    };
    let imported = imported.map_err(|problem| {
        let detail = format!(
            "{}. The first {} good lines act; sending all of them again does no harm",
            problem.detail,
            import.imported()
        );
        Problem { detail, ..problem }
    })?;
    Ok(json_response(StatusCode::OK, &imported))
}

async fn import_body(import: &mut Import, mut body: Body) -> Result<(), Problem> {
    let mut held = BytesMut::new();
    let mut line = 0;
    // Whether the beginning of the line that comes has been thrown away.
    let mut too_long = false;
    while let Some(frame) =
        tokio::time::timeout(READ_TIMEOUT, body.frame()).await.map_err(|_| read_timed_out())?
    {
        let frame = frame.map_err(|error| Problem::bad(format!("the body broke off: {error}")))?;
        let Ok(data) = frame.into_data() else { continue };
        held.extend_from_slice(&data);
        while let Some(end) = held.iter().position(|byte| *byte == b'\n') {
            let sent = held.split_to(end + 1).freeze();
            line += 1;
            if std::mem::take(&mut too_long) || end > MAX_LINE {
                reject_long_line(import, line);
            } else {
                one(import, line, &sent[..end]).await?;
            }
        }
        if held.len() > MAX_LINE {
            held.clear();
            too_long = true;
        }
    }
    line += 1;
    if too_long {
        reject_long_line(import, line);
        return Ok(());
    }
    one(import, line, &held.freeze()).await
}

async fn one(import: &mut Import, line: u64, sent: &[u8]) -> Result<(), Problem> {
    if sent.trim_ascii().is_empty() {
        return Ok(());
    }
    match decode::<ImportLine>(sent) {
        Ok(read) => import.line(line, sent, read).await.map_err(control_problem),
        Err(wrong) => {
            import.reject_line(line, wrong.detail, wrong.place);
            Ok(())
        }
    }
}

fn reject_long_line(import: &mut Import, line: u64) {
    import.reject_line(line, format!("a line has at most {MAX_LINE} bytes"), None);
}

fn read_timed_out() -> Problem {
    let detail = format!("nothing came for {} s", READ_TIMEOUT.as_secs());
    Problem::new(StatusCode::REQUEST_TIMEOUT, "Body too slow", detail)
}

/// A line of an export.
#[derive(Serialize)]
struct Exported<'a> {
    #[serde(flatten)]
    quota: &'a Quota,
    /// Ids stand for keys only where they were made.
    installation: &'a str,
}

/// All of them, one JSON text a line.
#[utoipa::path(get, path = "/admin/v1/quotas/export", operation_id = "GET_quotas_export",
    responses((status = 200, description = "Quotas with the installation that their ids are of.", body = String,
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
