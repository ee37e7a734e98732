//! Health endpoints: `GET /healthz` (liveness), `/readyz` (readiness), `/metrics`, and `/v1/hot` (the hot keys of this
//! node).

use super::request::Request;
use http::StatusCode;
use http::header::ACCEPT;
use std::sync::Arc;
use tollgate_http::h1;
use tollgate_http::headers::HeaderLookup;
use tollgate_observe::{ExpositionFormat, ProcessStatus, Verbosity};

const TEXT: &str = "text/plain; charset=utf-8";

pub(super) async fn response(status: &Arc<dyn ProcessStatus>, request: &Request<'_>) -> h1::RawResponse {
    let accept = request.fields.all(&ACCEPT).next().and_then(|accept| std::str::from_utf8(accept).ok());
    let (code, kind, text) = respond(status, request.path, request.query, accept.unwrap_or_default()).await;
    h1::RawResponse::new(code, kind, text)
}

type HealthText = (StatusCode, &'static str, String);

async fn respond(status: &Arc<dyn ProcessStatus>, path: &str, query: &str, accept: &str) -> HealthText {
    match path {
        "/healthz" => (StatusCode::OK, TEXT, "ok\n".to_owned()),
        "/v1/hot" => run_blocking(status, |status| ("application/json", status.hot().to_string())).await,
        "/metrics" => {
            let format = ExpositionFormat::accepted(accept);
            run_blocking(status, move |status| (format.media_type(), status.metrics_text(format))).await
        }
        _ => {
            let (ready, text) = status.readiness(Verbosity::from_query(query));
            let code = if ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
            (code, "application/json", text)
        }
    }
}

/// Renders a page on a blocking thread: with many rules it takes long, and must not delay decisions.
async fn run_blocking(
    status: &Arc<dyn ProcessStatus>,
    render: impl FnOnce(&dyn ProcessStatus) -> (&'static str, String) + Send + 'static,
) -> HealthText {
    let status = Arc::clone(status);
    match tokio::task::spawn_blocking(move || render(&*status)).await {
        Ok((kind, text)) => (StatusCode::OK, kind, text),
        Err(_) => (StatusCode::INTERNAL_SERVER_ERROR, TEXT, "internal error; try again\n".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};
    use std::thread;
    use tollgate_observe::MetricsWriter;

    /// Reports the thread that renders a page.
    struct Thread;

    impl ProcessStatus for Thread {
        fn is_ready(&self) -> bool {
            true
        }

        fn details(&self) -> Value {
            json!({})
        }

        fn metrics(&self, page: &mut MetricsWriter) {
            let id = format!("{:?}", thread::current().id());
            page.gauge(&format!("thread_{}", id.replace(['(', ')'], "_")), "Thread that rendered this.", 1);
        }

        fn hot(&self) -> Value {
            json!(format!("{:?}", thread::current().id()))
        }
    }

    /// A scrape must not delay decisions.
    #[tokio::test]
    async fn metrics_are_not_rendered_on_a_request_thread() {
        let status: Arc<dyn ProcessStatus> = Arc::new(Thread);
        let own = format!("{:?}", thread::current().id());
        for (path, own) in [("/metrics", own.replace(['(', ')'], "_")), ("/v1/hot", own)] {
            let (code, _, text) = respond(&status, path, "", "").await;
            assert!(code == StatusCode::OK && text.contains(&own[..9]) && !text.contains(&own), "{text}");
        }
    }
}
