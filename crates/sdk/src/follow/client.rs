//! Requests to the admin API of one server at a time, on one kept connection. Responses are read within bounds of size and
//! time.

use super::config::{FollowConfig, FollowError};
use crate::http1::{Connection, Origin, OriginError};
use bytes::Bytes;
use http::header::{AUTHORIZATION, CONTENT_TYPE, ETAG, HOST, HeaderValue, IF_NONE_MATCH};
use http::{Method, Request, Response, StatusCode};
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Incoming;
use serde::Deserialize;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;
use tollgate_replica::{
    DumpHeader, DumpReader, HotNames, HotReport, MAX_HOT, QuotaChanges, QuotaTable, ReplicaState,
};

/// Maximum size of a refusal, in bytes.
const MAX_PROBLEM: u64 = 64 << 10;
/// Maximum number of characters that are shown of one.
const MAX_DETAIL: usize = 300;

const STATE: &str = "/admin/v1/replica";
const QUOTAS: &str = "/admin/v1/replica/quotas";
const CHANGES: &str = "/admin/v1/replica/changes?after=";
const HOT: &str = "/admin/v1/replica/hot";
/// Maximum size of the list of hot counters, in bytes.
const MAX_HOT_BYTES: u64 = 32 * MAX_HOT as u64;

/// A client of several servers, one of which is followed at a time.
pub(super) struct Client {
    servers: Vec<Origin>,
    /// Index of the server that is followed.
    current: usize,
    token: Option<HeaderValue>,
    timeout: Duration,
    max_state_bytes: u64,
    max_quota_bytes: u64,
    connection: Option<Connection>,
}

/// Why a request has no response.
enum SendError {
    /// The connection was closed.
    Closed(FollowError),
    /// Something else, which another connection would not change.
    Other(FollowError),
}

impl From<FollowError> for SendError {
    fn from(error: FollowError) -> Self {
        Self::Other(error)
    }
}

impl From<SendError> for FollowError {
    fn from(error: SendError) -> Self {
        match error {
            SendError::Closed(error) | SendError::Other(error) => error,
        }
    }
}

/// A state, or that it is still the same.
pub(super) enum StateResponse {
    Unchanged,
    State(Box<ReplicaState>, Option<HeaderValue>),
}

impl Client {
    pub(super) fn new(config: &FollowConfig) -> Result<Self, FollowError> {
        let origin = |address: &String| {
            Origin::parse(address, config.ca.as_deref()).map_err(|error| match error {
                // The address is not shown, because it may contain credentials.
                OriginError::Address => FollowError::Config(
                    "an address is not a URL such as https://tollgate.internal:8082, without user, path and query"
                        .to_owned(),
                ),
                OriginError::Authorities(text) => FollowError::Config(text),
            })
        };
        let servers = std::iter::once(&config.address).chain(&config.other_addresses).map(origin);
        let servers = servers.collect::<Result<Vec<_>, _>>()?;
        if let Some(exposed) = servers.iter().find(|server| config.token.is_some() && server.is_exposed()) {
            tracing::warn!(server = exposed.authority(), "sending the token unencrypted; use https://");
        }
        let token = config.token.as_deref().map(|token| {
            let mut header = HeaderValue::from_str(&format!("Bearer {}", token.trim()))
                .map_err(|_| FollowError::Config("`token` has characters that no token has".to_owned()))?;
            header.set_sensitive(true);
            Ok::<_, FollowError>(header)
        });
        Ok(Self {
            servers,
            current: 0,
            token: token.transpose()?,
            timeout: config.timeout,
            max_state_bytes: config.max_state_bytes,
            max_quota_bytes: config.max_quota_bytes,
            connection: None,
        })
    }

    /// Returns the number of servers.
    pub(super) fn servers(&self) -> usize {
        self.servers.len()
    }

    /// Goes on with the next server.
    pub(super) fn next_server(&mut self) {
        self.current = (self.current + 1) % self.servers.len();
        self.connection = None;
    }

    /// Returns the host and port of the server that is followed.
    pub(super) fn server(&self) -> &str {
        self.servers[self.current].authority()
    }

    /// Closes the kept connection, so that a load balancer may choose another server.
    pub(super) fn disconnect(&mut self) {
        self.connection = None;
    }

    /// Returns the state, unless it is still the one with this tag.
    pub(super) async fn state(&mut self, tag: Option<&HeaderValue>) -> Result<StateResponse, FollowError> {
        let max = self.max_state_bytes;
        let response = self.request(Method::GET, STATE, tag, Bytes::new()).await?;
        if response.status() == StatusCode::NOT_MODIFIED && tag.is_some() {
            return Ok(StateResponse::Unchanged);
        }
        let tag = response.headers().get(ETAG).cloned();
        let bytes = self.read(response, max).await?;
        let state = ReplicaState::parse(&bytes).map_err(|error| FollowError::Invalid(error.to_string()))?;
        Ok(StateResponse::State(Box::new(state), tag))
    }

    /// Returns the changes of quotas after a revision.
    pub(super) async fn changes(&mut self, after: i64) -> Result<QuotaChanges, FollowError> {
        let max = self.max_state_bytes;
        let response = self.request(Method::GET, &format!("{CHANGES}{after}"), None, Bytes::new()).await?;
        let bytes = self.read(response, max).await?;
        let changes: QuotaChanges = serde_json::from_slice(&bytes)
            .map_err(|error| FollowError::Invalid(format!("malformed changes of quotas: {error}")))?;
        if changes.through < after || (changes.more && changes.through == after) {
            return Err(FollowError::Invalid("changes of quotas lead nowhere".to_owned()));
        }
        Ok(changes)
    }

    /// Reports what this process finds hot. Returns what the fleet does, unless it is still the list with this tag.
    pub(super) async fn exchange_hot(
        &mut self,
        report: &HotReport,
        tag: Option<&HeaderValue>,
    ) -> Result<Option<(HotNames, Option<HeaderValue>)>, FollowError> {
        let body = serde_json::to_vec(report).map_err(|error| FollowError::Invalid(error.to_string()))?;
        let response = self.request(Method::POST, HOT, tag, body.into()).await?;
        if response.status() == StatusCode::NOT_MODIFIED && tag.is_some() {
            return Ok(None);
        }
        let tag = response.headers().get(ETAG).cloned();
        let bytes = self.read(response, MAX_HOT_BYTES).await?;
        let names: HotNames = serde_json::from_slice(&bytes)
            .map_err(|error| FollowError::Invalid(format!("malformed hot counters: {error}")))?;
        Ok(Some((names, tag)))
    }

    /// Reads all quotas into a table.
    pub(super) async fn quotas(
        &mut self,
        table: &Arc<QuotaTable>,
        installation: &str,
    ) -> Result<DumpHeader, FollowError> {
        let (max, timeout) = (self.max_quota_bytes, self.timeout);
        let invalid = |error: &dyn std::fmt::Display| FollowError::Invalid(error.to_string());
        let mut body = self.request(Method::GET, QUOTAS, None, Bytes::new()).await?.into_body();
        let mut reader = DumpReader::new(Arc::clone(table));
        let mut total = 0_u64;
        while let Some(frame) = within(timeout, body.frame()).await? {
            let frame = frame.map_err(|error| FollowError::Unavailable(error.to_string()))?;
            let Ok(piece) = frame.into_data() else { continue };
            total += piece.len() as u64;
            if total > max {
                return Err(invalid(&format!(
                    "the quotas have more than {max} bytes; raise `max_quota_bytes`"
                )));
            }
            reader.push(&piece).map_err(|error| invalid(&error))?;
            tokio::task::yield_now().await;
        }
        reader.finish(installation).map_err(|error| invalid(&error))
    }

    /// Sends a request. A refusal is an error.
    async fn request(
        &mut self,
        method: Method,
        path: &str,
        tag: Option<&HeaderValue>,
        body: Bytes,
    ) -> Result<Response<Incoming>, FollowError> {
        let mut request = Request::new(Full::new(body));
        *request.uri_mut() =
            path.parse().map_err(|_| FollowError::Config(format!("invalid path `{path}`")))?;
        let headers = request.headers_mut();
        headers.insert(HOST, self.servers[self.current].host.clone());
        if let Some(tag) = tag {
            headers.insert(IF_NONE_MATCH, tag.clone());
        }
        if let Some(token) = &self.token {
            headers.insert(AUTHORIZATION, token.clone());
        }
        if method == Method::POST {
            headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        }
        *request.method_mut() = method;
        let kept = self.connection.take().filter(|kept| !kept.is_closed());
        let response = match kept {
            Some(kept) => match self.send(Some(kept), request.clone()).await {
                // The server may have closed a kept connection at that moment.
                Err(SendError::Closed(_)) => self.send(None, request).await?,
                other => other?,
            },
            None => self.send(None, request).await?,
        };
        let status = response.status();
        if status == StatusCode::OK || status == StatusCode::NOT_MODIFIED {
            return Ok(response);
        }
        let body = self.read(response, MAX_PROBLEM).await.unwrap_or_default();
        Err(FollowError::Refused { status: status.as_u16(), detail: detail(&body) })
    }

    async fn send(
        &mut self,
        kept: Option<Connection>,
        request: Request<Full<Bytes>>,
    ) -> Result<Response<Incoming>, SendError> {
        let failed = |error: hyper::Error| {
            let reason = FollowError::Unavailable(error.to_string());
            if error.is_parse() { SendError::Other(reason) } else { SendError::Closed(reason) }
        };
        let mut sender = match kept {
            Some(kept) => kept,
            None => {
                let connecting = self.servers[self.current].connect();
                within(self.timeout, connecting).await?.map_err(FollowError::Unavailable)?
            }
        };
        let response = within(self.timeout, async {
            sender.ready().await.map_err(failed)?;
            sender.send_request(request).await.map_err(failed)
        });
        let response = response.await??;
        self.connection = Some(sender);
        Ok(response)
    }

    /// Reads a body within its bound.
    async fn read(&mut self, response: Response<Incoming>, max: u64) -> Result<Bytes, FollowError> {
        let limited = Limited::new(response.into_body(), usize::try_from(max).unwrap_or(usize::MAX));
        let body = within(self.timeout, limited.collect()).await?;
        body.map(http_body_util::Collected::to_bytes).map_err(|error| {
            if error.is::<http_body_util::LengthLimitError>() {
                return FollowError::Invalid(format!(
                    "a response has more than {max} bytes; raise `max_state_bytes`"
                ));
            }
            FollowError::Unavailable(error.to_string())
        })
    }
}

async fn within<T>(timeout: Duration, doing: impl Future<Output = T>) -> Result<T, FollowError> {
    let late = |_| FollowError::Unavailable(format!("no response within {timeout:?}"));
    tokio::time::timeout(timeout, doing).await.map_err(late)
}

/// Returns what a refusal says, in short and without control characters.
fn detail(body: &[u8]) -> String {
    #[derive(Deserialize)]
    struct Said {
        detail: String,
    }
    let said = serde_json::from_slice(body).map(|said: Said| said.detail);
    let said = said.unwrap_or_else(|_| "this is not Tollgate's admin API".to_owned());
    said.chars().filter(|char| !char.is_control()).take(MAX_DETAIL).collect()
}
