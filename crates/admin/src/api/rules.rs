//! Rule endpoints: list revisions, show the active rules, preview, publish, approve and roll back.

use super::schemas::{ActiveRuleTexts, Anything, PublishedRevision, RevParameter};
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
use tollgate_observe::escape;
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

pub(crate) const ALL: &str = "/admin/v1/rules";
pub(crate) const PREVIEW: &str = "/admin/v1/rules/preview";
/// Previous path of [`PREVIEW`], supported for one release.
pub(crate) const CHECK: &str = "/admin/v1/rules/check";
/// Time limit for publishing and previewing: many rules take a while to compile and to replay.
pub(crate) const TIME_LIMIT: Duration = Duration::from_secs(60);
/// Maximum size of all files of a revision, in bytes of JSON.
const MAX_FILES: usize = 8 << 20;
/// Revisions per page.
const PAGE: i64 = 100;
/// Number of reasons for confirmation in the text of a problem.
const MAX_REASONS: usize = 5;

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
    /// Return revisions before this one.
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

/// The active rules, with the names of their files.
#[derive(Serialize, ToSchema)]
#[schema(as = ActiveRules)]
struct ActiveRuleFiles {
    #[schema(required = true)]
    rev: Option<i64>,
    revision: String,
    source: &'static str,
    files: Vec<String>,
}

/// Lists the active rules and their revisions.
#[utoipa::path(get, path = "/admin/v1/rules", operation_id = "GET_rules", params(ListParameters),
    responses((status = 200, description = "The active rules and a page of revisions.", body = RuleRevisions)),
    extensions(("x-role" = json!("viewer"))))]
async fn list(
    State(admin): State<Arc<AdminState>>,
    _: Viewer,
    StrictQuery(ListParameters { before }): StrictQuery<ListParameters>,
) -> ApiResult {
    let revisions = admin.control()?.rule_revisions(before, PAGE).await?;
    let full = i64::try_from(revisions.len()).is_ok_and(|length| length == PAGE);
    let next_before = revisions.last().map(|last| last.rev).filter(|rev| full && *rev > 1);
    let current = admin.rule_manager()?.active();
    let active = ActiveRuleFiles {
        rev: current.rev(),
        revision: current.rules.revision().to_owned(),
        source: current.source(),
        files: current.files.iter().map(|file| file.name.clone()).collect(),
    };
    Ok(json_response(StatusCode::OK, &RuleRevisions { active, revisions, next_before }))
}

/// Returns the active rules with the text of their files. Works without a database.
#[utoipa::path(get, path = "/admin/v1/rules/current", operation_id = "GET_rules_current",
    responses((status = 200, description = "The active rules.", body = ActiveRuleTexts)),
    extensions(("x-role" = json!("viewer"))))]
async fn current(State(admin): State<Arc<AdminState>>, _: Viewer) -> ApiResult {
    let Ok(manager) = admin.rule_manager() else {
        let rules = (admin.rules)();
        let files: Vec<RuleFile> = rules.sources().iter().map(RuleFile::from).collect();
        let body = json!({"rev": null, "revision": rules.revision(), "source": admin.rule_files.source(), "files": files});
        return Ok(json_response(StatusCode::OK, &body));
    };
    let current = manager.active();
    let ActiveRules { rules, files, published, .. } = &*current;
    let mut body = json!({"rev": null, "revision": rules.revision()});
    if let Some(published) = published {
        body = json!(published);
    }
    body["source"] = current.source().into();
    body["files"] = json!(files);
    Ok(json_response(StatusCode::OK, &body))
}

/// Returns the JSON Schema of rule files.
#[utoipa::path(get, path = "/admin/v1/rules/schema", operation_id = "GET_rules_schema",
    responses((status = 200, description = "The schema.",
        content((Anything = "application/schema+json"), (Anything = "application/json")))),
    extensions(("x-role" = json!("viewer"))))]
async fn schema(_: Viewer) -> Response {
    typed(StatusCode::OK, "application/schema+json", tollgate_rules::schema().to_owned())
}

/// Returns a revision with the text of its files.
#[utoipa::path(get, path = "/admin/v1/rules/{rev}", operation_id = "GET_rules_rev", params(RevParameter),
    responses((status = 200, description = "The revision.", body = PublishedRules)),
    extensions(("x-role" = json!("viewer"))))]
async fn one(State(admin): State<Arc<AdminState>>, _: Viewer, Rev(rev): Rev) -> ApiResult {
    let found = admin.control()?.rule_revision(rev).await?;
    let found = found.ok_or(ControlError::NotFound("revision with this number"))?;
    Ok(json_response(StatusCode::OK, &found))
}

/// Rules to validate and preview.
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

/// Previous path of `POST /admin/v1/rules/preview`, supported for one release.
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

/// Publishes rules.
#[utoipa::path(post, path = "/admin/v1/rules", operation_id = "POST_rules", request_body = PublishRequest,
    responses((status = 200, description = "The rules were already active.", body = PublishedRevision),
        (status = 201, description = "The rules are active.", body = PublishedRevision),
        (status = 202, description = "The rules need another operator's approval.", body = PublishedRevision)),
    extensions(("x-role" = json!("operator"))))]
async fn publish(
    State(admin): State<Arc<AdminState>>,
    Operator(actor): Operator,
    Json(sent): Json<PublishRequest, MAX_FILES>,
) -> ApiResult {
    // Spawned: a client that disconnects midway must not leave a revision that is stored but not active on this node.
    let manager = Arc::clone(admin.rule_manager()?);
    let publishing = tokio::spawn(async move { manager.publish(sent, &actor).await });
    let (status, rev, report) = match finished(publishing.await)? {
        Err(error) => return Ok(publish_problem(error)),
        Ok(PublishResult::Active(rev, report)) => (StatusCode::CREATED, rev, report),
        Ok(PublishResult::PendingApproval(rev, report)) => (StatusCode::ACCEPTED, rev, report),
        Ok(PublishResult::Unchanged(rev, report)) => (StatusCode::OK, rev, report),
    };
    revision(admin.control()?, status, rev, Some(&report)).await
}

/// Approves a pending revision of another operator.
#[utoipa::path(post, path = "/admin/v1/rules/{rev}/approve", operation_id = "POST_rules_rev_approve",
    params(RevParameter),
    responses((status = 200, description = "The approved revision.", body = RuleRevision)),
    extensions(("x-role" = json!("operator"))))]
async fn approve(
    State(admin): State<Arc<AdminState>>,
    Operator(actor): Operator,
    Rev(rev): Rev,
) -> ApiResult {
    let manager = Arc::clone(admin.rule_manager()?);
    let approving = tokio::spawn(async move { manager.approve(rev, &actor).await });
    match finished(approving.await)? {
        Err(ControlError::SelfApproval) => return Err(self_approval().into()),
        Err(ControlError::Conflict) => {
            let detail = "the active rules have changed since it was published; publish it again";
            return Err(Problem::new(StatusCode::PRECONDITION_FAILED, "Precondition failed", detail).into());
        }
        other => other?,
    }
    revision(admin.control()?, StatusCode::OK, rev, None).await
}

/// The reason for a change.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct Reason {
    reason: String,
}

/// Rolls back to an earlier revision.
#[utoipa::path(post, path = "/admin/v1/rules/{rev}/rollback", operation_id = "POST_rules_rev_rollback",
    params(RevParameter), request_body = Reason,
    responses((status = 201, description = "The rules of that revision are active again.", body = RuleRevision)),
    extensions(("x-role" = json!("operator"))))]
async fn roll_back(
    State(admin): State<Arc<AdminState>>,
    Operator(actor): Operator,
    Rev(to): Rev,
    Json(Reason { reason }): Json<Reason>,
) -> ApiResult {
    let manager = Arc::clone(admin.rule_manager()?);
    let rolling_back = tokio::spawn(async move { manager.roll_back(to, &reason, &actor).await });
    match finished(rolling_back.await)? {
        Err(error) => Ok(publish_problem(error)),
        Ok(rev) => revision(admin.control()?, StatusCode::CREATED, rev, None).await,
    }
}

/// Returns a revision without its text, after a change to it.
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
    let detail = "the author cannot approve their own revision; another operator must, with their own token (`tollgate \
                  token create --name THEIR-NAME --role operator`). Until the first token is created there is only one \
                  principal, `loopback`";
    Problem::new(StatusCode::FORBIDDEN, "Self-approval not allowed", detail)
}

/// Converts a publish error to a problem+json response with additional members.
fn publish_problem(error: PublishError) -> Response {
    let (status, title, detail, more) = match error {
        PublishError::Control(error) => return ApiError::from(error).into_response(),
        PublishError::Malformed(field, reason) => {
            return ApiError(Problem::bad(reason).in_field(field)).into_response();
        }
        PublishError::Invalid(report) => {
            let first = report.errors.first();
            let position = first.map(|first| format!("{}:{}:{}", first.file, first.line, first.column));
            let detail = first.map(|first| first.message.clone()).unwrap_or_default();
            let more = json!({"field": position, "errors": report.errors});
            (StatusCode::UNPROCESSABLE_ENTITY, "Invalid rules", detail, more)
        }
        PublishError::NeedsConfirm(report) => {
            let mut reasons: Vec<&str> =
                report.confirm.iter().take(MAX_REASONS).map(|reason| &*reason.detail).collect();
            let more = format!("{} more in `confirm`", report.confirm.len() - reasons.len());
            if report.confirm.len() > MAX_REASONS {
                reasons.push(&more);
            }
            let detail =
                format!("{}; to publish anyway, send it again with `confirm: true`", reasons.join("; "));
            (StatusCode::CONFLICT, "Confirmation required", detail, json!(report))
        }
        PublishError::FromFiles => {
            let detail =
                "this node loads its rules from files (--rules-from files); edit those files".to_owned();
            (StatusCode::CONFLICT, "Rules come from files", detail, Value::Null)
        }
        PublishError::Conflict(rev) => {
            let current = rev.map_or("the rule files are".to_owned(), |rev| format!("revision {rev} is"));
            let detail = format!("{current} now active; review the current rules and publish again");
            (StatusCode::PRECONDITION_FAILED, "Precondition failed", detail, json!({"active_rev": rev}))
        }
    };
    let mut body =
        json!({"type": "about:blank", "title": title, "status": status.as_u16(), "detail": detail});
    if let (Some(body), Value::Object(more)) = (body.as_object_mut(), more) {
        body.extend(more);
    }
    typed(status, MEDIA_TYPE, escape::json(&body.to_string()).into_owned())
}
