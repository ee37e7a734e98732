//! Rules as revisions: what acts, what was published when and why; check, publish, approve, go back.

use super::schemas::{ActingRules, Anything, PublishedRevision, RevParameter};
use crate::AdminState;
use crate::auth::{Operator, Viewer};
use crate::body::Json;
use crate::error::{ApiError, ApiResult};
use crate::path::{REVISION, Rev, revision as revision_number};
use crate::query::{StrictQuery, parsed};
use crate::response::{json_response, typed};
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use http::StatusCode;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::Duration;
use tollgate_control::{
    ActiveRules, ControlError, PreviewReport, PublishError, PublishRequest, PublishResult, PublishedRules,
    RuleFile, RuleRevision,
};
use tollgate_http::problem::{MEDIA_TYPE, Problem};
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

pub(crate) const ALL: &str = "/admin/v1/rules";
pub(crate) const PREVIEW: &str = "/admin/v1/rules/preview";
/// The former path of [`PREVIEW`], for one release.
pub(crate) const CHECK: &str = "/admin/v1/rules/check";
/// For publishing and checking: many rules take a while to compile and to rehearse.
pub(crate) const TIME_LIMIT: Duration = Duration::from_secs(60);
/// The most that all files of a revision may have, as JSON.
const MAX_FILES: usize = 8 << 20;
/// Revisions in a page.
const PAGE: i64 = 100;

pub(crate) fn routes() -> OpenApiRouter<Arc<AdminState>> {
    OpenApiRouter::new()
        .routes(routes!(list, publish))
        .routes(routes!(current))
        .routes(routes!(schema))
        .routes(routes!(preview))
        .routes(routes!(check))
        .routes(routes!(one))
        .routes(routes!(approve))
        .routes(routes!(roll_back))
}

#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
struct ListParameters {
    /// Revisions before this one.
    #[serde(default, deserialize_with = "given_revision")]
    #[param(value_type = Option<String>, pattern = "^([1-9][0-9]{0,17})?$")]
    before: Option<i64>,
}

fn given_revision<'de, D: Deserializer<'de>>(text: D) -> Result<Option<i64>, D::Error> {
    parsed(text, REVISION, revision_number).map(Some)
}

#[derive(Serialize, ToSchema)]
struct RuleRevisions {
    active: ActiveRuleFiles,
    revisions: Vec<RuleRevision>,
    #[schema(required = true)]
    next_before: Option<i64>,
}

/// What acts, by the names of its files.
#[derive(Serialize, ToSchema)]
#[schema(as = ActiveRules)]
struct ActiveRuleFiles {
    #[schema(required = true)]
    rev: Option<i64>,
    revision: String,
    source: &'static str,
    files: Vec<String>,
}

/// The rules that act, and all revisions.
#[utoipa::path(get, path = "/admin/v1/rules", operation_id = "GET_rules", params(ListParameters),
    responses((status = 200, description = "What was asked for.", body = RuleRevisions)),
    extensions(("x-role" = json!("viewer"))))]
async fn list(
    State(admin): State<Arc<AdminState>>,
    _: Viewer,
    StrictQuery(ListParameters { before }): StrictQuery<ListParameters>,
) -> ApiResult {
    let revisions = admin.control()?.rule_revisions(before, PAGE).await?;
    let full = i64::try_from(revisions.len()).is_ok_and(|length| length == PAGE);
    let next_before = revisions.last().map(|last| last.rev).filter(|rev| full && *rev > 1);
    let acting = admin.rule_manager()?.active();
    let active = ActiveRuleFiles {
        rev: acting.rev(),
        revision: acting.rules.revision().to_owned(),
        source: acting.source(),
        files: acting.files.iter().map(|file| file.name.clone()).collect(),
    };
    Ok(json_response(StatusCode::OK, &RuleRevisions { active, revisions, next_before }))
}

/// The active rules, with the text of their files. Works without a database.
#[utoipa::path(get, path = "/admin/v1/rules/current", operation_id = "GET_rules_current",
    responses((status = 200, description = "What was asked for.", body = ActingRules)),
    extensions(("x-role" = json!("viewer"))))]
async fn current(State(admin): State<Arc<AdminState>>, _: Viewer) -> ApiResult {
    let Ok(desk) = admin.rule_manager() else {
        let rules = (admin.rules)();
        let files: Vec<RuleFile> = rules.sources().iter().map(RuleFile::from).collect();
        let body = json!({"rev": null, "revision": rules.revision(), "source": "files", "files": files});
        return Ok(json_response(StatusCode::OK, &body));
    };
    let acting = desk.active();
    let ActiveRules { rules, files, published } = &*acting;
    let mut body = json!({"rev": null, "revision": rules.revision()});
    if let Some(published) = published {
        body = json!(published);
    }
    body["source"] = acting.source().into();
    body["files"] = json!(files);
    Ok(json_response(StatusCode::OK, &body))
}

/// The JSON schema of rule files.
#[utoipa::path(get, path = "/admin/v1/rules/schema", operation_id = "GET_rules_schema",
    responses((status = 200, description = "The schema.",
        content((Anything = "application/schema+json"), (Anything = "application/json")))),
    extensions(("x-role" = json!("viewer"))))]
async fn schema(_: Viewer) -> Response {
    typed(StatusCode::OK, "application/schema+json", tollgate_rules::schema().to_owned())
}

/// A revision, with the text of its files.
#[utoipa::path(get, path = "/admin/v1/rules/{rev}", operation_id = "GET_rules_rev", params(RevParameter),
    responses((status = 200, description = "What was asked for.", body = PublishedRules)),
    extensions(("x-role" = json!("viewer"))))]
async fn one(State(admin): State<Arc<AdminState>>, _: Viewer, Rev(rev): Rev) -> ApiResult {
    let found = admin.control()?.rule_revision(rev).await?;
    let found = found.ok_or(ControlError::NotFound("revision with this number"))?;
    Ok(json_response(StatusCode::OK, &found))
}

/// Rules that are to be checked.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct Candidate {
    files: Vec<RuleFile>,
}

/// Validates rules and previews their impact: errors, warnings, differences, and their effect on recent traffic.
#[utoipa::path(post, path = "/admin/v1/rules/preview", operation_id = "POST_rules_preview",
    request_body = Candidate,
    responses((status = 200, description = "The report.", body = PreviewReport)),
    extensions(("x-role" = json!("viewer"))))]
async fn preview(
    State(admin): State<Arc<AdminState>>,
    _: Viewer,
    Json(sent): Json<Candidate, MAX_FILES>,
) -> ApiResult {
    report_on(&admin, sent).await
}

/// The former path of `POST /admin/v1/rules/preview`, supported for one release.
#[utoipa::path(post, path = "/admin/v1/rules/check", operation_id = "POST_rules_check", request_body = Candidate,
    responses((status = 200, description = "The report.", body = PreviewReport)),
    extensions(("x-role" = json!("viewer"))))]
async fn check(
    State(admin): State<Arc<AdminState>>,
    _: Viewer,
    Json(sent): Json<Candidate, MAX_FILES>,
) -> ApiResult {
    report_on(&admin, sent).await
}

async fn report_on(admin: &AdminState, sent: Candidate) -> ApiResult {
    let report = admin.rule_manager()?.preview_files(sent.files).await;
    Ok(report.map_or_else(publish_problem, |report| json_response(StatusCode::OK, &report)))
}

/// Publish rules.
#[utoipa::path(post, path = "/admin/v1/rules", operation_id = "POST_rules", request_body = PublishRequest,
    responses((status = 200, description = "They act already.", body = PublishedRevision),
        (status = 201, description = "They act.", body = PublishedRevision),
        (status = 202, description = "Somebody else must approve of them.", body = PublishedRevision)),
    extensions(("x-role" = json!("operator"))))]
async fn publish(
    State(admin): State<Arc<AdminState>>,
    Operator(actor): Operator,
    Json(sent): Json<PublishRequest, MAX_FILES>,
) -> ApiResult {
    // On its own: who hangs up in the middle must not leave a revision that is written and does not act here.
    let desk = Arc::clone(admin.rule_manager()?);
    let publishing = tokio::spawn(async move { desk.publish(sent, &actor).await });
    let (status, rev, report) = match finished(publishing.await)? {
        Err(refusal) => return Ok(publish_problem(refusal)),
        Ok(PublishResult::Active(rev, report)) => (StatusCode::CREATED, rev, report),
        Ok(PublishResult::PendingApproval(rev, report)) => (StatusCode::ACCEPTED, rev, report),
        Ok(PublishResult::Unchanged(rev, report)) => (StatusCode::OK, rev, report),
    };
    revision(admin.control()?, status, rev, Some(&report)).await
}

/// Approve of what somebody else published.
#[utoipa::path(post, path = "/admin/v1/rules/{rev}/approve", operation_id = "POST_rules_rev_approve",
    params(RevParameter),
    responses((status = 200, description = "What was asked for.", body = RuleRevision)),
    extensions(("x-role" = json!("operator"))))]
async fn approve(
    State(admin): State<Arc<AdminState>>,
    Operator(actor): Operator,
    Rev(rev): Rev,
) -> ApiResult {
    let desk = Arc::clone(admin.rule_manager()?);
    let approving = tokio::spawn(async move { desk.approve(rev, &actor).await });
    match finished(approving.await)? {
        Err(ControlError::SelfApproval) => return Err(self_approval().into()),
        Err(ControlError::Conflict) => {
            let detail = "something else acts by now than when it was published: publish it again";
            return Err(Problem::new(StatusCode::PRECONDITION_FAILED, "Precondition failed", detail).into());
        }
        other => other?,
    }
    revision(admin.control()?, StatusCode::OK, rev, None).await
}

/// Why something is done.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct Reason {
    reason: String,
}

/// Let a revision act again.
#[utoipa::path(post, path = "/admin/v1/rules/{rev}/rollback", operation_id = "POST_rules_rev_rollback",
    params(RevParameter), request_body = Reason,
    responses((status = 201, description = "It acts.", body = RuleRevision)),
    extensions(("x-role" = json!("operator"))))]
async fn roll_back(
    State(admin): State<Arc<AdminState>>,
    Operator(actor): Operator,
    Rev(to): Rev,
    Json(Reason { reason }): Json<Reason>,
) -> ApiResult {
    let desk = Arc::clone(admin.rule_manager()?);
    let going = tokio::spawn(async move { desk.roll_back(to, &reason, &actor).await });
    match finished(going.await)? {
        Err(refusal) => Ok(publish_problem(refusal)),
        Ok(rev) => revision(admin.control()?, StatusCode::CREATED, rev, None).await,
    }
}

/// A revision as it is told after something was done to it, without its text.
async fn revision(
    control: &tollgate_control::ControlPlane,
    status: StatusCode,
    rev: i64,
    report: Option<&PreviewReport>,
) -> ApiResult {
    let found: Option<RuleRevision> = control.rule_revisions(Some(rev + 1), 1).await?.into_iter().next();
    let mut body = json!(found);
    if let (Some(body), Some(Value::Object(report))) =
        (body.as_object_mut(), report.map(|report| json!(report)))
    {
        body.extend(report);
    }
    Ok(json_response(status, &body))
}

fn finished<T>(done: Result<T, tokio::task::JoinError>) -> Result<T, ControlError> {
    done.map_err(|error| ControlError::Corrupt(error.to_string()))
}

fn self_approval() -> Problem {
    let detail = "whoever published it cannot approve of it. Another person must, with a token of their own: `tollgate \
                  token create --name THEIR-NAME --role operator`. Before the first token is made there is only one \
                  identity, `loopback`";
    Problem::new(StatusCode::FORBIDDEN, "Self-approval not allowed", detail)
}

/// What speaks against it, as problem+json with more to read.
fn publish_problem(refusal: PublishError) -> Response {
    let (status, title, detail, more) = match refusal {
        PublishError::Control(error) => return ApiError::from(error).into_response(),
        PublishError::Malformed(place, why) => {
            return ApiError(Problem::bad(why).in_field(place)).into_response();
        }
        PublishError::Invalid(report) => {
            let first = report.errors.first();
            let place = first.map(|first| format!("{}:{}:{}", first.file, first.line, first.column));
            let detail = first.map(|first| first.message.clone()).unwrap_or_default();
            let more = json!({"field": place, "errors": report.errors});
            (StatusCode::UNPROCESSABLE_ENTITY, "Invalid rules", detail, more)
        }
        PublishError::NeedsConfirm(report) => {
            let share =
                report.rehearsal.as_ref().map_or(0.0, |rehearsal| rehearsal.newly_denied_share) * 100.0;
            let detail = format!(
                "{share:.1}% of the last requests would be newly denied; if that is meant, send it again with \
                 `confirm: true`"
            );
            (StatusCode::CONFLICT, "Confirmation required", detail, json!(report))
        }
        PublishError::FromFiles => {
            let detail = "this node takes its rules from files (--rules-from files): change those".to_owned();
            (StatusCode::CONFLICT, "Rules come from files", detail, Value::Null)
        }
        PublishError::Conflict(acting) => {
            let acts = acting.map_or("the rule files act".to_owned(), |rev| format!("revision {rev} acts"));
            let detail = format!("{acts} by now: look at it, and publish again");
            (StatusCode::PRECONDITION_FAILED, "Precondition failed", detail, json!({"active_rev": acting}))
        }
    };
    let mut body =
        json!({"type": "about:blank", "title": title, "status": status.as_u16(), "detail": detail});
    if let (Some(body), Value::Object(more)) = (body.as_object_mut(), more) {
        body.extend(more);
    }
    typed(status, MEDIA_TYPE, body.to_string())
}
