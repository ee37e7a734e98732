//! OpenAPI document, served at `GET /admin/v1/openapi.json`. utoipa collects it from the handlers' annotations and
//! types; this module adds what is common to all paths: the header, the problem response that every path may return,
//! and schemas in the form that client generators handle best.

use super::schemas::{Anything, Problem};
use crate::response::typed;
use crate::{AdminState, router};
use axum::response::Response;
use bytes::Bytes;
use http::StatusCode;
use serde_json::{Map, Value, json};
use std::sync::{Arc, OnceLock};
use utoipa::OpenApi;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

#[derive(OpenApi)]
#[openapi(
    info(
        title = "Tollgate admin API",
        version = "1",
        description = "Manages quotas, rules, emergency measures and usage at run time. `x-role` is the role that a path requires. Errors are application/problem+json (RFC 9457).",
        license(name = "Apache-2.0", identifier = "Apache-2.0")
    ),
    servers((url = "/")),
    security(("token" = []), ("session" = []), ()),
    components(schemas(Problem))
)]
struct Header;

/// Response schemas that allow no additional properties. Request schemas declare this themselves.
#[doc(hidden)]
pub const CLOSED_SCHEMAS: [&str; 29] = [
    "ActiveRuleTexts",
    "ActiveRules",
    "AffectedCaller",
    "Emergencies",
    "Emergency",
    "Grant",
    "ImpactReport",
    "LeftOfGrant",
    "LogSettings",
    "NewGrant",
    "PendingFiles",
    "PreviewReport",
    "PublishedRevision",
    "PublishedRules",
    "RuleDiagnostic",
    "RuleDiff",
    "RuleDrift",
    "RuleFilesState",
    "RuleRevision",
    "RuleRevisions",
    "RuleTree",
    "TreeDescriptor",
    "TreeDomain",
    "TreeLimit",
    "TreeRule",
    "TreeTier",
    "UnmatchedRule",
    "Usage",
    "UsedLimit",
];

/// Returns the document. Not a `LazyLock`: it names what creates it, so every program that contains it, such as that of the
/// unit tests, would be compiled with all handlers.
fn document() -> &'static Value {
    static DOCUMENT: OnceLock<Value> = OnceLock::new();
    DOCUMENT.get_or_init(create_document)
}

fn text() -> Bytes {
    static TEXT: OnceLock<Bytes> = OnceLock::new();
    TEXT.get_or_init(|| format!("{:#}\n", document()).into()).clone()
}

/// Returns the document's header, without any paths.
pub(crate) fn header() -> utoipa::openapi::OpenApi {
    Header::openapi()
}

pub(crate) fn routes() -> OpenApiRouter<Arc<AdminState>> {
    OpenApiRouter::new().routes(routes!(openapi))
}

/// Returns this OpenAPI document.
#[utoipa::path(get, path = "/admin/v1/openapi.json", operation_id = "GET_openapi_json",
    responses((status = 200, description = "The document.", body = Anything)),
    extensions(("x-role" = json!("anybody"))))]
async fn openapi() -> Response {
    typed(StatusCode::OK, "application/json", text())
}

/// Returns the methods of a path, in the format of the `Allow` header.
pub(crate) fn methods(path: &str) -> String {
    let operations = document()["paths"][path].as_object();
    let known = ["get", "post", "put", "delete"].into_iter();
    let known = known.filter(|method| operations.is_some_and(|operations| operations.contains_key(*method)));
    known.map(str::to_uppercase).collect::<Vec<_>>().join(", ")
}

fn create_document() -> Value {
    let mut document = json!(router::api().into_openapi());
    document["components"]["securitySchemes"] = json!({
        "token": {"type": "http", "scheme": "bearer"},
        "session": {"type": "apiKey", "in": "cookie", "name": crate::auth::sessions::COOKIE_NAME},
    });
    let problem = json!({
        "description": "What is wrong and how to fix it.",
        "content": {"application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}},
    });
    let operations = document["paths"].as_object_mut().into_iter().flat_map(Map::values_mut);
    for operation in operations.filter_map(Value::as_object_mut).flat_map(Map::values_mut) {
        operation["responses"]["default"] = problem.clone();
        if operation["x-role"] == "anybody" {
            operation["security"] = json!([]);
        }
        // Absent values are omitted: parameters and bodies are never null.
        let parameters = operation.get_mut("parameters").and_then(Value::as_array_mut);
        let parameters = parameters.into_iter().flatten().filter_map(|one| one.get_mut("schema"));
        parameters.for_each(without_null);
        let contents = operation.pointer_mut("/requestBody/content").and_then(Value::as_object_mut);
        let contents = contents.into_iter().flat_map(Map::values_mut).filter_map(|one| one.get_mut("schema"));
        contents.for_each(without_null);
    }
    if let Some(schemas) = document["components"]["schemas"].as_object_mut() {
        let flat: Vec<_> = schemas
            .iter()
            .filter_map(|(name, schema)| Some((name.clone(), flat(schemas, schema)?)))
            .collect();
        schemas.extend(flat);
        // utoipa inverts the meaning of `min_properties`.
        schemas["LogLevelUpdate"]["minProperties"] = 1.into();
        for name in CLOSED_SCHEMAS {
            if let Some(schema) = schemas.get_mut(name) {
                schema["additionalProperties"] = false.into();
            }
        }
    }
    document
}

fn without_null(schema: &mut Value) {
    let other =
        |all: &Value, is_null: fn(&Value) -> bool| all.as_array()?.iter().find(|one| !is_null(one)).cloned();
    if let Some(only) = schema.get("type").and_then(|all| other(all, |one| one == "null")) {
        schema["type"] = only;
    } else if let Some(only) = schema.get("oneOf").and_then(|all| other(all, |one| one["type"] == "null")) {
        *schema = only;
    }
}

/// Merges the parts of a composed schema into one. `allOf` does not work here: no part lists the other parts'
/// properties, so each would have to allow any additional property.
fn flat(schemas: &Map<String, Value>, schema: &Value) -> Option<Value> {
    let mut whole = schema.clone();
    let parts = whole.as_object_mut()?.remove("allOf")?;
    let (mut properties, mut required) = (Map::new(), Vec::new());
    for part in parts.as_array()? {
        let name = part["$ref"].as_str().and_then(|path| path.rsplit('/').next());
        let part = name.map_or(part, |name| &schemas[name]);
        properties.extend(part["properties"].as_object().cloned().unwrap_or_default());
        required.extend(part["required"].as_array().cloned().unwrap_or_default());
    }
    whole["type"] = "object".into();
    whole["properties"] = properties.into();
    whole["required"] = required.into();
    Some(whole)
}
