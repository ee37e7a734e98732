//! Many quotas at once, one a line: sent in, or handed out. Neither is ever held whole in memory.

use super::routes::{Asked, Reply, Route};
use super::{lines, problem};
use crate::http::problem::Problem;
use crate::http::{body, json_answer};
use bytes::BytesMut;
use http_body_util::BodyExt;
use hyper::body::Incoming;
use hyper::{Method, StatusCode};
use serde::Serialize;
use serde_json::json;
use std::sync::Arc;
use std::time::Duration;
use tollgate_control::{ControlError, Import, ImportLine, KeyHash, Quota, Role};

pub(super) const ROUTES: &[Route] = &[
    Route::new(Method::POST, "/admin/v1/quotas/import", Role::Operator, |asked| Box::pin(import(asked)))
        .patient(LONGEST),
    Route::new(Method::GET, "/admin/v1/quotas/export", Role::Viewer, |asked| Box::pin(export(asked))),
];

/// The longest that an import may take as a whole.
const LONGEST: Duration = Duration::from_secs(6 * 3_600);
/// The longest that whoever sends one may keep silent.
const SILENCE: Duration = Duration::from_secs(30);
/// The longest line, in bytes.
const LINE: usize = 64 * 1024;

async fn import(asked: Asked) -> Result<Reply, Problem> {
    let Asked { admin, body, actor, .. } = asked;
    let Some(mut import) = Import::begin(admin.control()?, (admin.rules)(), actor) else {
        body::discard(body).await;
        let detail = "another import is under way here: wait for its end";
        return Err(Problem::new(StatusCode::CONFLICT, "One at a time", detail));
    };
    let told = match take_in(&mut import, body).await {
        Ok(()) => import.finish().await.map_err(problem),
        Err(problem) => {
            // What is gathered and not yet written is left out, so that it is clear which lines act.
            let _ = import.break_off().await;
            Err(problem)
        }
    };
    let told = told.map_err(|problem| {
        let detail = format!(
            "{}. The first {} good lines act; sending all of them again does no harm",
            problem.detail,
            import.imported()
        );
        Problem { detail, ..problem }
    })?;
    Ok(super::routes::whole(json_answer(StatusCode::OK, format!("{:#}\n", json!(told)).into_bytes())))
}

async fn take_in(import: &mut Import, mut body: Incoming) -> Result<(), Problem> {
    let mut held = BytesMut::new();
    let mut line = 0;
    // Whether the beginning of the line that comes has been thrown away.
    let mut too_long = false;
    while let Some(frame) = tokio::time::timeout(SILENCE, body.frame()).await.map_err(|_| silent())? {
        let frame = frame.map_err(|error| Problem::bad(format!("the body broke off: {error}")))?;
        let Ok(data) = frame.into_data() else { continue };
        held.extend_from_slice(&data);
        while let Some(end) = held.iter().position(|byte| *byte == b'\n') {
            let sent = held.split_to(end + 1).freeze();
            line += 1;
            if std::mem::take(&mut too_long) || end > LINE {
                refuse_long(import, line);
            } else {
                one(import, line, &sent[..end]).await?;
            }
        }
        if held.len() > LINE {
            held.clear();
            too_long = true;
        }
    }
    line += 1;
    if too_long {
        refuse_long(import, line);
        return Ok(());
    }
    one(import, line, &held.freeze()).await
}

async fn one(import: &mut Import, line: u64, sent: &[u8]) -> Result<(), Problem> {
    if sent.trim_ascii().is_empty() {
        return Ok(());
    }
    match body::decode::<ImportLine>(sent) {
        Ok(read) => import.line(line, sent, read).await.map_err(problem),
        Err(wrong) => {
            import.refuse(line, wrong.detail, wrong.place);
            Ok(())
        }
    }
}

fn refuse_long(import: &mut Import, line: u64) {
    import.refuse(line, format!("a line has at most {LINE} bytes"), None);
}

fn silent() -> Problem {
    let detail = format!("nothing came for {} s", SILENCE.as_secs());
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

async fn export(asked: Asked) -> Result<Reply, Problem> {
    let control = Arc::clone(asked.admin.control()?);
    let installation = control.installation();
    let next = move |after: Option<KeyHash>| {
        let (control, installation) = (Arc::clone(&control), installation.clone());
        async move {
            let quotas = control.export(after).await?;
            let last = quotas.last().and_then(|quota| KeyHash::parse(&quota.id));
            let mut text = Vec::with_capacity(quotas.len() * 256);
            for quota in &quotas {
                lines::write(&mut text, &Exported { quota, installation: &installation });
            }
            Ok::<_, ControlError>(last.map(|last| (text, Some(last))))
        }
    };
    lines::reply("quotas.ndjson", None, next).await.map_err(problem)
}
