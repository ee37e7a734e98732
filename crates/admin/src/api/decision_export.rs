//! Export of the decision log: `GET /admin/v1/decisions/export`, the decisions that a search matches, newest first, as
//! NDJSON or CSV, page by page while the client reads.

use super::decisions::{run_blocking, time, truncate_key, verdict};
use crate::auth::Viewer;
use crate::error::ApiResult;
use crate::query::{StrictQuery, parsed};
use crate::response::typed;
use crate::{AdminState, ndjson};
use axum::body::Body;
use axum::extract::State;
use bytes::Bytes;
use futures_util::stream;
use http::StatusCode;
use http::header::{CONTENT_DISPOSITION, HeaderValue};
use serde::{Deserialize, Deserializer};
use serde_json::Value;
use std::sync::Arc;
use tollgate_core::Timestamp;
use tollgate_observe::{DecisionQuery, LoggedVerdict, escape};
use utoipa::IntoParams;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

pub(crate) fn routes() -> OpenApiRouter<Arc<AdminState>> {
    OpenApiRouter::new().routes(routes!(export))
}

/// Decisions read at a time.
const PAGE: usize = 500;

#[derive(Clone, Copy, Default)]
enum ExportFormat {
    #[default]
    Ndjson,
    Csv,
}

#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
struct ExportParameters {
    /// `ndjson` (the default) or `csv`.
    #[serde(default, deserialize_with = "format")]
    #[param(value_type = Option<String>)]
    format: ExportFormat,
    /// Value of any attribute: the raw value, its masked form or its id.
    key: Option<String>,
    /// First characters of any attribute's value, as the log shows it.
    prefix: Option<String>,
    /// Domain of the request.
    domain: Option<String>,
    rule: Option<String>,
    #[serde(default, deserialize_with = "verdict")]
    #[param(value_type = Option<String>)]
    verdict: Option<LoggedVerdict>,
    #[serde(default, deserialize_with = "time")]
    #[param(value_type = Option<String>)]
    from: Option<Timestamp>,
    #[serde(default, deserialize_with = "time")]
    #[param(value_type = Option<String>)]
    to: Option<Timestamp>,
}

fn format<'de, D: Deserializer<'de>>(text: D) -> Result<ExportFormat, D::Error> {
    parsed(text, "must be ndjson or csv", |text| match text {
        "ndjson" => Some(ExportFormat::Ndjson),
        "csv" => Some(ExportFormat::Csv),
        _ => None,
    })
}

/// Exports the decisions that match, newest first.
#[utoipa::path(get, path = "/admin/v1/decisions/export", operation_id = "GET_decisions_export", params(ExportParameters),
    responses((status = 200, description = "One decision per line.", content(
        (String = "application/x-ndjson"), (String = "text/csv"),
    ))),
    extensions(("x-role" = json!("viewer"))))]
async fn export(
    State(admin): State<Arc<AdminState>>,
    _: Viewer,
    StrictQuery(of): StrictQuery<ExportParameters>,
) -> ApiResult {
    let format = of.format;
    let search = DecisionQuery {
        id: None,
        key: of.key.map(truncate_key),
        prefix: of.prefix,
        domain: of.domain,
        rule: of.rule,
        ruled: of.verdict,
        from: of.from,
        to: of.to,
        before: None,
        limit: PAGE,
    };
    // Decisions made while the export runs are not part of it: the search goes backward from the newest.
    let pages = stream::try_unfold(Some((search, Heading::Missing)), move |state| {
        let admin = Arc::clone(&admin);
        async move {
            let Some((mut search, heading)) = state else { return Ok::<_, std::io::Error>(None) };
            let page = run_blocking(&admin, move |observe| {
                let (found, next) = observe.search(&search);
                let found: Vec<Value> = found.iter().map(|one| one.json(observe.node_info())).collect();
                search.before = next;
                (found, next.is_some().then_some(search))
            });
            let (found, next) = page.await.map_err(|problem| std::io::Error::other(problem.detail))?;
            let text = text_of(&found, format, heading);
            Ok(Some((Bytes::from(text), next.map(|search| (search, Heading::Written)))))
        }
    });
    let (media_type, file) = match format {
        ExportFormat::Ndjson => ("application/x-ndjson", "decisions.ndjson"),
        ExportFormat::Csv => ("text/csv; charset=utf-8", "decisions.csv"),
    };
    let mut response = typed(StatusCode::OK, media_type, Body::from_stream(pages));
    if let Ok(value) = HeaderValue::from_str(&format!("attachment; filename=\"{file}\"")) {
        response.headers_mut().insert(CONTENT_DISPOSITION, value);
    }
    Ok(response)
}

/// Whether the first line of a CSV file was written.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Heading {
    Missing,
    Written,
}

/// Columns of the CSV form; the last has all attributes, as JSON.
const COLUMNS: [&str; 14] = [
    "at",
    "id",
    "verdict",
    "origin",
    "domain",
    "rule",
    "key_id",
    "cost",
    "used_before",
    "remaining",
    "retry_after_ms",
    "node",
    "why",
    "attributes",
];

fn text_of(found: &[Value], format: ExportFormat, heading: Heading) -> Vec<u8> {
    let mut text = Vec::new();
    match format {
        ExportFormat::Ndjson => found.iter().for_each(|one| ndjson::write(&mut text, one)),
        ExportFormat::Csv => {
            if heading == Heading::Missing {
                text.extend_from_slice(COLUMNS.join(",").as_bytes());
                text.extend_from_slice(b"\r\n");
            }
            for one in found {
                let fields: Vec<String> = COLUMNS.iter().map(|column| field(&one[column])).collect();
                text.extend_from_slice(fields.join(",").as_bytes());
                text.extend_from_slice(b"\r\n");
            }
        }
    }
    text
}

/// Returns a CSV field. Attributes come from untrusted clients: a spreadsheet must not take one for a formula.
fn field(value: &Value) -> String {
    let text = match value {
        Value::Null => return String::new(),
        Value::Number(number) => return number.to_string(),
        Value::String(text) => text.clone(),
        other => other.to_string(),
    };
    let text = escape::json(&text);
    let guard = if text.starts_with(['=', '+', '-', '@', '\t', '\r']) { "'" } else { "" };
    format!("\"{guard}{}\"", text.replace('"', "\"\""))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn fields_are_quoted_and_never_formulas() {
        for (value, expected) in [
            (json!(null), ""),
            (json!(7), "7"),
            (json!("a,b"), "\"a,b\""),
            (json!("say \"hi\"\nthere"), "\"say \"\"hi\"\"\nthere\""),
            (json!("=HYPERLINK(1)"), "\"'=HYPERLINK(1)\""),
            (json!({"a": "b"}), "\"{\"\"a\"\":\"\"b\"\"}\""),
        ] {
            assert_eq!(field(&value), expected);
        }
    }

    #[test]
    fn the_heading_is_written_once() {
        let page = [json!({"id": "1", "at": "now"})];
        let first = String::from_utf8(text_of(&page, ExportFormat::Csv, Heading::Missing)).expect("text");
        let next = String::from_utf8(text_of(&page, ExportFormat::Csv, Heading::Written)).expect("text");
        assert_eq!(first, format!("{}\r\n{next}", COLUMNS.join(",")));
        assert!(next.starts_with("\"now\",\"1\",,"), "{next}");
        let lines = String::from_utf8(text_of(&page, ExportFormat::Ndjson, Heading::Missing)).expect("text");
        assert_eq!(lines, "{\"at\":\"now\",\"id\":\"1\"}\n");
    }
}
