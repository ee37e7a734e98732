//! Tests that the router and the OpenAPI document agree on paths, methods and roles. They are not in the crate itself: it would
//! be compiled again with all its handlers, which takes longer than everything else in it.

use axum::Router;
use axum::body::Body;
use axum::response::Response;
use http::StatusCode;
use http::header::ALLOW;
use http_body_util::BodyExt;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;
use tollgate_admin::{
    AdminState, AuthMode, CLOSED_SCHEMAS, ConfirmFilesError, DumpSlots, ExplainFuture, ExplainQuery,
    Explainer, FailedAuthThrottle, LogLevels, LogSettings, NodeCache, OverloadReport, PendingFiles,
    RuleDrift, RuleFilesControl, Sessions, UsageFuture, UsageQuery, UsageReader, router_for,
};
use tollgate_control::Role;
use tollgate_engine::UsageError;
use tollgate_http::problem::{NO_SUCH_PATH, Problem};
use tollgate_observe::{MetricsWriter, ProcessStatus};
use tollgate_rules::{Options, Ruleset};
use tower::ServiceExt;

struct Process;

impl ProcessStatus for Process {
    fn is_ready(&self) -> bool {
        true
    }

    fn details(&self) -> Value {
        json!({})
    }

    fn metrics(&self, _: &mut MetricsWriter) {}
}

impl LogLevels for Process {
    fn now(&self) -> LogSettings {
        LogSettings { level: "info".to_owned(), modules: BTreeMap::new() }
    }

    fn change(&self, _: LogSettings) -> Result<(), (String, String)> {
        Ok(())
    }
}

impl UsageReader for Process {
    fn usage<'a>(&'a self, _: &'a UsageQuery) -> UsageFuture<'a> {
        Box::pin(async { Err(UsageError::Domain("no such domain".to_owned())) })
    }

    fn reset<'a>(&'a self, of: &'a UsageQuery) -> UsageFuture<'a> {
        self.usage(of)
    }
}

impl Explainer for Process {
    fn explain<'a>(&'a self, _: &'a ExplainQuery, _: Option<&'a Arc<Ruleset>>) -> ExplainFuture<'a> {
        Box::pin(async { Err(UsageError::Domain("no such domain".to_owned())) })
    }

    fn options(&self) -> Options {
        Options::default()
    }

    fn identify(
        &self,
        _: &Ruleset,
        _: Option<&str>,
        _: &[u8],
    ) -> Result<(Vec<(String, String)>, IpAddr), Problem> {
        Err(Problem::bad("no identity"))
    }
}

impl RuleFilesControl for Process {
    fn pending(&self) -> Option<PendingFiles> {
        None
    }

    fn drift(&self) -> Option<RuleDrift> {
        None
    }

    fn confirm(&self, _: &str) -> Result<(), ConfirmFilesError> {
        Err(ConfirmFilesError::NothingPending)
    }
}

/// Returns an admin server without a database, with roles from client certificates.
fn server(name: Option<&str>) -> Router {
    let rules = Arc::new(Ruleset::load(&[], &Options::default()).expect("no rules"));
    let roles = [Role::Replica, Role::Viewer, Role::Operator, Role::Admin];
    let state = AdminState {
        control: None,
        rule_manager: None,
        rules: Box::new(move || Arc::clone(&rules)),
        rule_files: Arc::new(Process),
        usage: Arc::new(Process),
        address_attribute: Box::new(|address| address.to_string()),
        explainer: Arc::new(Process),
        overload: Box::new(OverloadReport::default),
        status: Arc::new(Process),
        log: Arc::new(Process),
        auth_mode: AuthMode::TokenRequired,
        sessions: Sessions::default(),
        roles: roles.into_iter().map(|role| (role.name().to_owned(), role)).collect(),
        throttle: FailedAuthThrottle::default(),
        nodes: NodeCache::default(),
        dumps: DumpSlots::default(),
        history_days: 30,
    };
    router_for(state, name)
}

async fn call(method: &str, path: &str, name: Option<&str>) -> Response {
    let request = http::Request::builder().method(method).uri(path);
    server(name).oneshot(request.body(Body::empty()).expect("a request")).await.expect("a response")
}

async fn json_of(response: Response) -> Value {
    let bytes = response.into_body().collect().await.expect("a body").to_bytes();
    serde_json::from_slice(&bytes).expect("JSON")
}

/// Returns every path, method and role of the document.
async fn operations() -> Vec<(String, String, String)> {
    let document = json_of(call("GET", "/admin/v1/openapi.json", None).await).await;
    let mut all = Vec::new();
    for (path, operations) in document["paths"].as_object().expect("paths") {
        for (method, operation) in operations.as_object().expect("operations") {
            let role = operation["x-role"].as_str().expect("a role").to_owned();
            all.push((path.clone(), method.to_uppercase(), role));
        }
    }
    all
}

/// Returns a path with its parameters filled in.
fn concrete(path: &str) -> String {
    path.replace("{rev}", "1").replace(['{', '}'], "")
}

/// A client generated from the document would otherwise call paths that do not exist, or be denied access to them.
#[tokio::test]
async fn the_document_lists_the_required_roles() {
    let all = operations().await;
    assert_eq!(all.len(), 65, "{all:#?}");
    let ranks = ["anybody", "replica", "viewer", "operator", "admin"];
    for (path, method, role) in &all {
        let needed = ranks.iter().position(|rank| rank == role).expect("a role");
        for (rank, name) in ranks.iter().enumerate() {
            // The event stream and the import are authorized, and then fail for lack of a database.
            let status = call(method, &concrete(path), (rank > 0).then_some(name)).await.status();
            // What replicas read contains a secret.
            let may = if *role == "replica" { matches!(*name, "replica" | "admin") } else { rank >= needed };
            let expected = match (may, rank) {
                (true, _) => None,
                (false, 0) => Some(StatusCode::UNAUTHORIZED),
                (false, _) => Some(StatusCode::FORBIDDEN),
            };
            let about = format!("{method} {path} by {name}: {status}");
            match expected {
                Some(expected) => assert_eq!(status, expected, "{about}"),
                None => assert!(!matches!(status.as_u16(), 401 | 403 | 405), "{about}"),
            }
        }
    }
}

/// A method that is missing from the document is missing from the router too, and `Allow` lists the existing ones.
#[tokio::test]
async fn every_method_is_in_the_document() {
    let all = operations().await;
    for (path, ..) in &all {
        let known: Vec<&str> =
            all.iter().filter(|(other, ..)| other == path).map(|(_, method, _)| method.as_str()).collect();
        for method in ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE"] {
            if known.contains(&method) || (method == "HEAD" && known.contains(&"GET")) {
                continue;
            }
            let rejected = call(method, &concrete(path), Some("admin")).await;
            assert_eq!(rejected.status(), StatusCode::METHOD_NOT_ALLOWED, "{method} {path}");
            let mut allowed: Vec<_> =
                rejected.headers()[ALLOW].to_str().expect("a list").split(", ").map(str::to_owned).collect();
            allowed.sort_unstable();
            let mut known: Vec<_> = known.iter().map(|method| (*method).to_owned()).collect();
            known.sort_unstable();
            assert_eq!(allowed, known, "{method} {path}");
        }
    }
}

/// Unknown paths return a problem, with the headers that every response has.
#[tokio::test]
async fn an_unknown_path_is_a_problem() {
    for path in
        ["/admin/v1/qoutas", "/index.html", "/admin/v1/quotas/a/b", "/admin/v1//", "/admin/v1/rules/1/reject"]
    {
        let response = call("GET", path, Some("admin")).await;
        assert_eq!(response.status(), StatusCode::NOT_FOUND, "{path}");
        assert_eq!(response.headers()["content-type"], "application/problem+json");
        assert_eq!(response.headers()["cache-control"], "no-store");
        assert_eq!(response.headers()["x-content-type-options"], "nosniff");
        let detail = format!("there is nothing at `{path}`; try GET /admin/v1/quotas");
        let body = json_of(response).await;
        assert_eq!((&body["detail"], &body["type"]), (&json!(detail), &json!(NO_SUCH_PATH)));
    }
}

/// A client that leaves a parameter empty, perhaps by an unset variable in a script, learns which one.
#[tokio::test]
async fn an_empty_parameter_is_named() {
    for (method, path, field) in [
        ("GET", "/admin/v1/quotas/", "api_key"),
        ("DELETE", "/admin/v1/quotas/by-id/?x=1", "id"),
        ("POST", "/admin/v1/usage//reset", "api_key"),
        ("GET", "/admin/v1/rules/", "rev"),
        ("GET", "/admin/v1/decisions//why", "id"),
    ] {
        let response = call(method, path, Some("admin")).await;
        assert_eq!(response.status(), StatusCode::BAD_REQUEST, "{path}");
        assert_eq!(json_of(response).await["field"], field, "{path}");
    }
    let put = call("PUT", "/admin/v1/usage/", Some("admin")).await;
    assert_eq!(put.headers()[ALLOW], "GET");
}

/// A page of another site can neither read nor write; the dashboard page itself is public.
#[tokio::test]
async fn other_origins_get_only_the_page() {
    let status = async |path: &str| {
        let request = http::Request::builder().uri(path).header("host", "a").header("origin", "http://b");
        let request = request.body(Body::empty()).expect("a request");
        server(None).oneshot(request).await.expect("a response").status()
    };
    assert_eq!(status("/").await, StatusCode::OK);
    assert_eq!(status("/admin/v1/stats").await, StatusCode::FORBIDDEN);
    assert_eq!(status("/nowhere").await, StatusCode::FORBIDDEN);
}

/// A client generator or a response validator would fail on a reference without a schema.
#[tokio::test]
async fn every_reference_leads_to_a_schema() {
    fn references<'v>(value: &'v Value, found: &mut Vec<&'v str>) {
        match value {
            Value::Object(members) => {
                found.extend(members.get("$ref").and_then(Value::as_str));
                members.values().for_each(|member| references(member, found));
            }
            Value::Array(items) => items.iter().for_each(|item| references(item, found)),
            _ => {}
        }
    }
    let document = json_of(call("GET", "/admin/v1/openapi.json", None).await).await;
    let mut found = Vec::new();
    references(&document, &mut found);
    assert!(found.len() > 50, "{found:?}");
    let schemas = document["components"]["schemas"].as_object().expect("schemas");
    for reference in found {
        let name = reference.strip_prefix("#/components/schemas/").expect("a schema");
        assert!(schemas.contains_key(name), "{name}");
    }
    for name in CLOSED_SCHEMAS {
        assert_eq!(schemas[name]["additionalProperties"], false, "{name}");
    }
    assert!(!document.to_string().contains("allOf"), "no schema uses allOf");
}

/// `Allow` headers come from the document.
#[tokio::test]
async fn methods_are_listed_in_order() {
    for (path, methods) in [
        ("/admin/v1/quotas/k", "GET, PUT, DELETE"),
        ("/admin/v1/session", "GET, POST, DELETE"),
        ("/admin/v1/rules/check", "POST"),
    ] {
        assert_eq!(call("PATCH", path, Some("admin")).await.headers()[ALLOW], methods, "{path}");
    }
}
