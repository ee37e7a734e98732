//! `POST /admin/v1/explain`: what would happen to a request, by the active rules or by a draft, and why: which rules
//! match, the limit in force of each and where it comes from, what each counter holds. Nothing is charged or written.

use super::explained::{ExplanationBody, body};
use super::usage::usage_unavailable;
use crate::AdminState;
use crate::auth::Viewer;
use crate::body::Json;
use crate::caller_path::{CallerPath, Spelled};
use crate::error::{ApiResult, unprocessable};
use crate::response::json_response;
use axum::extract::State;
use http::StatusCode;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::future::Future;
use std::net::IpAddr;
use std::pin::Pin;
use std::sync::Arc;
use tollgate_control::RuleFile;
use tollgate_core::{Cost, CounterStore};
use tollgate_engine::{Check, CheckExplanation, Limiter, UsageError};
use tollgate_http::problem::Problem;
use tollgate_rules::{CALLER_KEY, Descriptor, Diagnostics, Domain, Options, Ruleset, Source};
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

pub(crate) const PATH: &str = "/admin/v1/explain";
/// Maximum number of attributes, of descriptors, and of entries of a descriptor, as for a check.
const MAX_ENTRIES: usize = 64;
/// Maximum length of a key or value, in bytes.
const MAX_TEXT: usize = 8 * 1024;
/// Maximum size of a request with the files of a draft, in bytes of JSON.
const MAX_BODY: usize = 8 << 20;

pub(crate) fn routes() -> OpenApiRouter<Arc<AdminState>> {
    OpenApiRouter::new().routes(routes!(explain))
}

/// A request to explain.
#[derive(Clone, Debug, Default)]
pub struct ExplainQuery {
    /// The domain; required if there are several.
    pub domain: Option<String>,
    /// The attributes, unless there are descriptors.
    pub attributes: Vec<(String, String)>,
    /// The descriptors, in their place.
    pub descriptors: Option<Vec<ExplainDescriptor>>,
    /// The cost.
    pub cost: u64,
    /// The client's full address, if the request was given by its head.
    pub address: Option<IpAddr>,
    /// Signals that are supposed to be reported before the request.
    pub signals: Vec<(String, f64)>,
}

/// The explanation, or the reason why there is none.
pub type ExplainFuture<'a> = Pin<Box<dyn Future<Output = Result<CheckExplanation, UsageError>> + Send + 'a>>;

/// Explains requests, implemented by the process: a limiter, the options of its rules and its identity settings.
pub trait Explainer: Send + Sync {
    /// Explains a request by the active rules, or by `draft`.
    fn explain<'a>(&'a self, of: &'a ExplainQuery, draft: Option<&'a Arc<Ruleset>>) -> ExplainFuture<'a>;
    /// Returns the options that rules are compiled with.
    fn options(&self) -> Options;
    /// Identifies the caller of a request head in JSON: its attributes in a domain of `rules`, and its address.
    ///
    /// # Errors
    /// A problem with the head.
    fn identify(
        &self,
        rules: &Ruleset,
        domain: Option<&str>,
        head: &[u8],
    ) -> Result<(Vec<(String, String)>, IpAddr), Problem>;
}

impl ExplainQuery {
    /// Explains the request with a limiter over any store.
    pub fn explain<'a, S: CounterStore>(
        &'a self,
        limiter: &'a Limiter<S>,
        draft: Option<&'a Arc<Ruleset>>,
    ) -> ExplainFuture<'a> {
        Box::pin(async move {
            let of = self;
            let attributes = pairs(&of.attributes);
            let described = of.descriptors.as_deref().unwrap_or_default();
            let entries: Vec<Vec<(&str, &str)>> = described.iter().map(|one| pairs(&one.entries)).collect();
            let descriptors: Vec<Descriptor<'_>> = described
                .iter()
                .zip(&entries)
                .map(|(one, entries)| Descriptor { entries, hits: one.hits.map(Cost::new), limit: None })
                .collect();
            let check = match of.descriptors {
                Some(_) => Check::descriptors("", &descriptors),
                None => Check::attributes("", &attributes),
            };
            let mut check = check.with_cost(Cost::new(of.cost));
            check.address = of.address;
            let signals: Vec<(&str, f64)> =
                of.signals.iter().map(|(name, value)| (name.as_str(), *value)).collect();
            limiter.explain_with_signals(draft, of.domain.as_deref(), &check, &signals).await
        })
    }
}

fn pairs(owned: &[(String, String)]) -> Vec<(&str, &str)> {
    owned.iter().map(|(key, value)| (key.as_str(), value.as_str())).collect()
}

/// A request to explain: `attributes`, `descriptors` or `request`.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct ExplainRequest {
    /// The domain; required if there are several.
    #[serde(default)]
    domain: Option<String>,
    /// Attributes by name. `api_key` may be the id of a caller from a list.
    #[serde(default)]
    attributes: Option<BTreeMap<String, String>>,
    /// Descriptors, as an RLS client sends them.
    #[serde(default)]
    descriptors: Option<Vec<ExplainDescriptor>>,
    /// The head of an HTTP request, whose caller is identified as `/v1/check` does.
    #[serde(default)]
    request: Option<ExplainHead>,
    /// The cost; 1 if absent.
    #[serde(default)]
    cost: Option<u64>,
    /// Signals by name that are supposed to be reported before the request, whatever their sources; the limits that follow them
    /// are explained as after the step that they cause. Nothing is recorded.
    #[serde(default)]
    signals: BTreeMap<String, f64>,
    /// The files of a draft, which then explains the request in place of the active rules.
    #[serde(default)]
    files: Option<Vec<RuleFile>>,
}

/// One descriptor.
#[derive(Clone, Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ExplainDescriptor {
    /// Keys and values, in order.
    pub entries: Vec<(String, String)>,
    /// Its hits; those of the request if absent.
    #[serde(default)]
    pub hits: Option<u64>,
}

/// The head of an HTTP request.
#[derive(Deserialize, Serialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct ExplainHead {
    method: String,
    /// The request target: a path with or without a query, or a URL.
    target: String,
    /// The address of the peer that sent the request.
    peer: String,
    /// Names and values, in message order.
    #[serde(default)]
    headers: Vec<(String, String)>,
}

/// Explains what would happen to a request. Charges nothing and writes nothing.
#[utoipa::path(post, path = "/admin/v1/explain", operation_id = "POST_explain", request_body = ExplainRequest,
    responses((status = 200, description = "The explanation.", body = ExplanationBody)),
    extensions(("x-role" = json!("viewer"))))]
async fn explain(
    State(admin): State<Arc<AdminState>>,
    _: Viewer,
    Json(sent): Json<ExplainRequest, MAX_BODY>,
) -> ApiResult {
    let draft = match sent.files {
        Some(files) => Some(compiled(&admin, files).await?),
        None => None,
    };
    let sent = ExplainRequest { files: None, ..sent };
    let query = query(&admin, sent, draft.as_deref()).await?;
    let explanation = admin.explainer.explain(&query, draft.as_ref()).await;
    let explanation = explanation.map_err(|error| match error {
        UsageError::Domain(_) => unnamed_domain(draft.as_deref().unwrap_or(&(admin.rules)())),
        UsageError::Signal(error) => Problem::bad(error.to_string()).in_field("signals"),
        error => usage_unavailable(error),
    })?;
    if draft.is_none() {
        return Ok(json_response(StatusCode::OK, &body(&query, &explanation, "active", None)));
    }
    // The active rules may have other domains: what they say then is that they have no such domain.
    let same = ExplainQuery { domain: Some(explanation.matching.domain.clone()), ..query.clone() };
    let active = match admin.explainer.explain(&same, None).await {
        // Signals that only the draft uses.
        Err(UsageError::Signal(_)) => {
            admin.explainer.explain(&ExplainQuery { signals: Vec::new(), ..same }, None).await
        }
        explained => explained,
    };
    let active = active.map_err(usage_unavailable)?;
    Ok(json_response(StatusCode::OK, &body(&query, &explanation, "draft", Some(&active))))
}

fn unnamed_domain(rules: &Ruleset) -> Problem {
    let names: Vec<&str> = rules.domains().map(Domain::name).collect();
    let detail = match names[..] {
        [] => "the rules have no domain; name one".to_owned(),
        _ => format!(
            "the rules have several domains; name one of {} (on the command line `--domain NAME`)",
            names.join(", ")
        ),
    };
    Problem::bad(detail).in_field("domain")
}

/// Compiles the files of a draft.
async fn compiled(admin: &AdminState, files: Vec<RuleFile>) -> Result<Arc<Ruleset>, Problem> {
    let options = admin.explainer.options();
    let compiling = tokio::task::spawn_blocking(move || {
        let sources: Vec<Source> = files.iter().map(Source::from).collect();
        Ruleset::load(&sources, &options).map(Arc::new).map_err(|errors| invalid_draft(&errors))
    });
    let internal = |_| Problem::new(StatusCode::INTERNAL_SERVER_ERROR, "Internal error", "try again");
    compiling.await.map_err(internal)?
}

fn invalid_draft(errors: &Diagnostics) -> Problem {
    let first = errors.all().first();
    let place = first.map(|first| format!("{}:{}:{}", first.file, first.line, first.column));
    let detail = first.map(|first| first.message.clone()).unwrap_or_default();
    unprocessable("Invalid rules", detail).in_field(place.unwrap_or_else(|| "files".to_owned()))
}

/// Validates what was sent.
async fn query(
    admin: &AdminState,
    sent: ExplainRequest,
    draft: Option<&Ruleset>,
) -> Result<ExplainQuery, Problem> {
    let given = [sent.attributes.is_some(), sent.descriptors.is_some(), sent.request.is_some()];
    if given.into_iter().filter(|given| *given).count() != 1 {
        let detail = "write `attributes`, `descriptors` or `request`, one of them";
        return Err(Problem::bad(detail).in_field("attributes"));
    }
    let bounded = |field: &'static str, count: usize| match count > MAX_ENTRIES {
        true => Err(Problem::bad(format!("write at most {MAX_ENTRIES}")).in_field(field)),
        false => Ok(()),
    };
    let check_text = |field: &'static str, text: &str| match text.len() > MAX_TEXT {
        true => Err(Problem::bad(format!("write at most {MAX_TEXT} bytes")).in_field(field)),
        false => Ok(()),
    };
    check_text("domain", sent.domain.as_deref().unwrap_or_default())?;
    let mut attributes: Vec<(String, String)> = sent.attributes.into_iter().flatten().collect();
    bounded("attributes", attributes.len())?;
    for (key, value) in &attributes {
        check_text("attributes", key)?;
        check_text("attributes", value)?;
    }
    for (_, value) in attributes.iter_mut().filter(|(key, _)| key == CALLER_KEY) {
        *value = api_key(admin, std::mem::take(value)).await?;
    }
    bounded("signals", sent.signals.len())?;
    for name in sent.signals.keys() {
        check_text("signals", name)?;
    }
    let signals = sent.signals.into_iter().collect();
    let descriptors = sent.descriptors;
    let all = descriptors.as_deref().unwrap_or_default();
    bounded("descriptors", all.len())?;
    for ExplainDescriptor { entries, .. } in all {
        bounded("descriptors", entries.len())?;
        for (key, value) in entries {
            check_text("descriptors", key)?;
            check_text("descriptors", value)?;
        }
    }
    let domain = sent.domain.filter(|domain| !domain.is_empty());
    let mut address = None;
    if let Some(head) = sent.request {
        let active = (admin.rules)();
        let head = serde_json::to_vec(&head).map_err(|error| Problem::bad(error.to_string()))?;
        let (identified, from) =
            admin.explainer.identify(draft.unwrap_or(&active), domain.as_deref(), &head)?;
        (attributes, address) = (identified, Some(from));
    }
    Ok(ExplainQuery { domain, attributes, descriptors, cost: sent.cost.unwrap_or(1), address, signals })
}

/// Returns the API key, also of a caller that was given by its id. What is like an id and of no known caller is taken as
/// a key: nothing is changed by it.
async fn api_key(admin: &AdminState, sent: String) -> Result<String, Problem> {
    match CallerPath::by_key(admin, sent.clone(), Spelled::KeyOrId).await {
        Ok(caller) => Ok(caller.attribute()?.1.to_owned()),
        Err(problem) if problem.status == StatusCode::NOT_FOUND => Ok(sent),
        Err(problem) => Err(problem),
    }
}
