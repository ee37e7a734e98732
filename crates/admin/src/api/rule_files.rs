//! Endpoints of this node's rule files: changed ones that wait for confirmation (`--guard-files`), and how they differ from
//! published rules.
//!
//! Each node reads its own files, so a confirmation applies to the node that receives it.

use crate::AdminState;
use crate::auth::{Operator, Viewer};
use crate::body::Json;
use crate::error::{ApiResult, control_problem};
use crate::query::{NoParameters, StrictQuery};
use crate::response::json_response;
use axum::extract::State;
use http::StatusCode;
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use tollgate_control::{ControlError, RuleDiff};
use tollgate_http::problem::Problem;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

/// Changed rule files that are not active until they are confirmed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, ToSchema)]
pub struct PendingFiles {
    /// Their rules hash.
    pub revision: String,
    /// Why they need confirmation.
    pub reasons: Vec<String>,
}

/// Rule files that differ from the published rules, which are active in their place.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, ToSchema)]
pub struct RuleDrift {
    /// Number of the published revision.
    pub rev: i64,
    /// Rules hash of the files; null if they are broken.
    #[schema(required = true)]
    pub files_revision: Option<String>,
    /// What is wrong with the files; null if nothing is.
    #[schema(required = true)]
    pub error: Option<String>,
    /// What would change with the files; empty if the same rules are written in other words.
    pub diff: Vec<RuleDiff>,
}

/// Why files could not be confirmed; nothing has changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ConfirmFilesError {
    /// No files wait for confirmation.
    NothingPending,
    /// Files with another rules hash wait.
    Other(String),
}

/// Control of the rule files of a process.
pub trait RuleFilesControl: Send + Sync {
    /// Returns the name of the rules' source without published rules: `files`, or `xds`.
    fn source(&self) -> &'static str {
        "files"
    }

    /// Returns the files that wait for confirmation.
    fn pending(&self) -> Option<PendingFiles>;

    /// Returns how the files differ from published rules; `None` if they do not, or there are none.
    fn drift(&self) -> Option<RuleDrift>;

    /// Makes the files with this rules hash active.
    ///
    /// # Errors
    /// [`ConfirmFilesError`] if no files with this rules hash wait.
    fn confirm(&self, revision: &str) -> Result<(), ConfirmFilesError>;
}

pub(crate) fn routes() -> OpenApiRouter<Arc<AdminState>> {
    OpenApiRouter::new().routes(routes!(get)).routes(routes!(confirm))
}

/// The rule files of this node.
#[derive(Serialize, ToSchema)]
struct RuleFilesState {
    /// Rules hash of the active rules.
    active_revision: String,
    /// Changed files that wait for confirmation; null if none do.
    #[schema(required = true)]
    pending: Option<PendingFiles>,
    /// How the files differ from the published rules, which are active in their place; null if they do not, or nothing is
    /// published.
    #[schema(required = true)]
    drift: Option<RuleDrift>,
}

/// On a blocking thread: files are compiled to be compared.
async fn state(admin: &AdminState) -> ApiResult {
    let (active_revision, files) = ((admin.rules)().revision().to_owned(), Arc::clone(&admin.rule_files));
    let reading = tokio::task::spawn_blocking(move || (files.pending(), files.drift())).await;
    let (pending, drift) =
        reading.map_err(|error| control_problem(ControlError::Corrupt(error.to_string())))?;
    Ok(json_response(StatusCode::OK, &RuleFilesState { active_revision, pending, drift }))
}

/// Returns the state of this node's rule files: changes that wait for confirmation, and differences from published rules.
#[utoipa::path(get, path = "/admin/v1/rules/files", operation_id = "GET_rules_files",
    responses((status = 200, description = "The state of the rule files.", body = RuleFilesState)),
    extensions(("x-role" = json!("viewer"))))]
async fn get(State(admin): State<Arc<AdminState>>, _: Viewer, _: StrictQuery<NoParameters>) -> ApiResult {
    state(&admin).await
}

/// The files to confirm.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct FileConfirmation {
    /// Rules hash of the files, from `GET /admin/v1/rules/files`, the log or `/readyz?verbose`.
    revision: String,
}

/// Makes changed rule files of this node active that wait for confirmation.
#[utoipa::path(post, path = "/admin/v1/rules/files/confirm", operation_id = "POST_rules_files_confirm",
    request_body = FileConfirmation,
    responses((status = 200, description = "The files are active.", body = RuleFilesState)),
    extensions(("x-role" = json!("operator"))))]
async fn confirm(
    State(admin): State<Arc<AdminState>>,
    Operator(actor): Operator,
    Json(FileConfirmation { revision }): Json<FileConfirmation>,
) -> ApiResult {
    let pending = admin.rule_files.pending().filter(|pending| pending.revision == revision);
    // Recorded before it is done: a change that is not recorded must not happen.
    if let (Some(pending), Some(control)) = (pending, &admin.control) {
        control.audit_confirmed_files(&pending.revision, &pending.reasons, &actor).await?;
    }
    let (files, confirmed) = (Arc::clone(&admin.rule_files), revision.clone());
    let done = tokio::task::spawn_blocking(move || files.confirm(&confirmed)).await;
    done.map_err(|error| control_problem(ControlError::Corrupt(error.to_string())))?.map_err(problem)?;
    tracing::warn!(by = actor.name, revision, "rule files confirmed through the admin API");
    state(&admin).await
}

fn problem(error: ConfirmFilesError) -> Problem {
    let (title, detail) = match error {
        ConfirmFilesError::NothingPending => (
            "Nothing to confirm",
            "no rule files of this node wait for confirmation; see GET /admin/v1/rules/files".to_owned(),
        ),
        ConfirmFilesError::Other(revision) => (
            "Other files",
            format!(
                "the files that wait for confirmation have the rules hash {revision}; review and confirm these"
            ),
        ),
    };
    Problem::new(StatusCode::CONFLICT, title, detail).in_field("revision")
}
