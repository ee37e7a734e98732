//! Log level endpoints: `GET`, `PUT /admin/v1/log` read and change the log level of the running process.

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

/// Minimum levels at which log messages are written.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, ToSchema)]
pub struct LogSettings {
    /// Default level: error, warn, info, debug, trace or off.
    #[schema(schema_with = level)]
    pub level: String,
    /// Level overrides per module.
    pub modules: BTreeMap<String, String>,
}

/// A change of the default level, of module levels, or both.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct LogLevelUpdate {
    /// New default level; unchanged if absent.
    #[serde(default, deserialize_with = "given")]
    #[schema(schema_with = level)]
    level: Option<String>,
    /// New module levels; if absent, all module levels are removed.
    #[serde(default, deserialize_with = "given")]
    #[schema(value_type = BTreeMap<String, String>)]
    modules: Option<BTreeMap<String, String>>,
}

/// Deserializes a value that is present, so that an explicit `null` is an error.
fn given<'d, D: Deserializer<'d>, T: Deserialize<'d>>(value: D) -> Result<Option<T>, D::Error> {
    T::deserialize(value).map(Some)
}

/// Log level control of the process.
pub trait LogLevels: Send + Sync {
    /// Returns the active log levels.
    fn now(&self) -> LogSettings;

    /// Activates other log levels, immediately and until the process ends.
    ///
    /// # Errors
    /// The invalid field, and the reason.
    fn change(&self, wanted: LogSettings) -> Result<(), (String, String)>;
}

fn level() -> Object {
    let levels = ["error", "warn", "info", "debug", "trace", "off"];
    ObjectBuilder::new().schema_type(Type::String).enum_values(Some(levels)).build()
}

pub(crate) fn routes() -> OpenApiRouter<Arc<AdminState>> {
    OpenApiRouter::new().routes(routes!(get, put))
}

/// Returns the active log levels.
#[utoipa::path(get, path = "/admin/v1/log", operation_id = "GET_log",
    responses((status = 200, description = "The active log levels.", body = LogSettings)),
    extensions(("x-role" = json!("viewer"))))]
async fn get(State(admin): State<Arc<AdminState>>, _: Viewer) -> Response {
    json_response(StatusCode::OK, &admin.log.now())
}

/// Changes the log levels until the process ends.
#[utoipa::path(put, path = "/admin/v1/log", operation_id = "PUT_log", request_body = LogLevelUpdate,
    responses((status = 200, description = "The new log levels.", body = LogSettings)),
    extensions(("x-role" = json!("operator"))))]
async fn put(
    State(admin): State<Arc<AdminState>>,
    Operator(actor): Operator,
    Json(update): Json<LogLevelUpdate>,
) -> ApiResult {
    let wanted = match update {
        LogLevelUpdate { level: None, modules: None } => {
            return Err(Problem::bad("missing field; set `level`, `modules` or both").into());
        }
        LogLevelUpdate { level, modules } => LogSettings {
            level: level.unwrap_or_else(|| admin.log.now().level),
            modules: modules.unwrap_or_default(),
        },
    };
    let changed = admin.log.change(wanted);
    changed.map_err(|(field, detail)| unprocessable("Validation failed", detail).in_field(field))?;
    let now = admin.log.now();
    tracing::warn!(by = actor.name, level = now.level, modules = ?now.modules, "log level changed");
    Ok(json_response(StatusCode::OK, &now))
}
