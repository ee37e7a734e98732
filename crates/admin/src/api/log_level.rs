//! `GET`, `PUT /admin/v1/log`: which messages the process writes, changed while it runs.

use crate::AdminState;
use crate::auth::{Operator, Viewer};
use crate::body::Json;
use crate::error::{ApiResult, unprocessable};
use crate::response::json_response;
use axum::extract::State;
use axum::response::Response;
use http::StatusCode;
use serde::{Deserialize, Deserializer, Serialize};
use std::collections::BTreeMap;
use std::sync::Arc;
use tollgate_http::problem::Problem;
use utoipa::ToSchema;
use utoipa::openapi::schema::{Object, ObjectBuilder, Type};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

/// From which level on messages are written.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, ToSchema)]
pub struct LogSettings {
    /// error, warn, info, debug, trace or off.
    #[schema(schema_with = level)]
    pub level: String,
    /// Modules with a level of their own.
    pub modules: BTreeMap<String, String>,
}

/// What is to be changed: the level of all, of single modules, or both.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = LogChange)]
struct LogLevelUpdate {
    /// As it is, unless said.
    #[serde(default, deserialize_with = "given")]
    #[schema(schema_with = level)]
    level: Option<String>,
    /// None, unless said.
    #[serde(default, deserialize_with = "given")]
    #[schema(value_type = BTreeMap<String, String>)]
    modules: Option<BTreeMap<String, String>>,
}

/// What is there must be something: `null` is no level.
fn given<'d, D: Deserializer<'d>, T: Deserialize<'d>>(value: D) -> Result<Option<T>, D::Error> {
    T::deserialize(value).map(Some)
}

/// Who writes the messages.
pub trait LogLevels: Send + Sync {
    /// What acts.
    fn now(&self) -> LogSettings;

    /// Lets something else act, at once and until the process ends.
    ///
    /// # Errors
    /// The place of what cannot act, and why.
    fn change(&self, wanted: LogSettings) -> Result<(), (String, String)>;
}

fn level() -> Object {
    let levels = ["error", "warn", "info", "debug", "trace", "off"];
    ObjectBuilder::new().schema_type(Type::String).enum_values(Some(levels)).build()
}

pub(crate) fn routes() -> OpenApiRouter<Arc<AdminState>> {
    OpenApiRouter::new().routes(routes!(get, put))
}

/// Which messages are written.
#[utoipa::path(get, path = "/admin/v1/log", operation_id = "GET_log",
    responses((status = 200, description = "What was asked for.", body = LogSettings)),
    extensions(("x-role" = json!("viewer"))))]
async fn get(State(admin): State<Arc<AdminState>>, _: Viewer) -> Response {
    json_response(StatusCode::OK, &admin.log.now())
}

/// Write others, until the process ends.
#[utoipa::path(put, path = "/admin/v1/log", operation_id = "PUT_log", request_body = LogLevelUpdate,
    responses((status = 200, description = "What was asked for.", body = LogSettings)),
    extensions(("x-role" = json!("operator"))))]
async fn put(
    State(admin): State<Arc<AdminState>>,
    Operator(actor): Operator,
    Json(update): Json<LogLevelUpdate>,
) -> ApiResult {
    let wanted = match update {
        LogLevelUpdate { level: None, modules: None } => {
            return Err(Problem::bad("write `level`, `modules` or both").into());
        }
        LogLevelUpdate { level, modules } => LogSettings {
            level: level.unwrap_or_else(|| admin.log.now().level),
            modules: modules.unwrap_or_default(),
        },
    };
    let changed = admin.log.change(wanted);
    changed.map_err(|(place, detail)| unprocessable("Validation failed", detail).in_field(place))?;
    let now = admin.log.now();
    tracing::warn!(by = actor.name, level = now.level, modules = ?now.modules, "the log level was changed");
    Ok(json_response(StatusCode::OK, &now))
}
