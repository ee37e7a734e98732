//! Authentication and authorization of admin requests.
//!
//! On a loopback address, before the first token is created, every local user has the admin role. Afterwards, and
//! always on any other address, a request needs a token, the session cookie that a browser got for one, or a client
//! certificate whose name has a role. While the database is unavailable, recently authenticated principals have
//! read-only access ([`authorize_reader`]). Cross-site requests are rejected: a page of another site can neither send
//! a request here nor, by pointing a name of its own at loopback, read a response.

pub(crate) mod session;
pub(crate) mod sessions;
pub(crate) mod throttle;
pub(crate) mod tls;

use crate::AdminState;
use crate::conn::limiter::AdminConnection;
use crate::error::{ApiError, control_problem};
use axum::extract::FromRequestParts;
use http::StatusCode;
use http::header::{AUTHORIZATION, HOST, ORIGIN};
use http::request::Parts;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;
use tls::ClientPeer;
use tollgate_control::{Actor, Principal, Role, TokenCheck};
use tollgate_http::problem::Problem;
use tollgate_http::same_site;

/// When a token is required.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AuthMode {
    /// The address is loopback: a token is required once the first one was created.
    LoopbackOpen,
    /// A token is always required.
    TokenRequired,
}

impl AuthMode {
    /// Returns the mode for an address.
    #[must_use]
    pub const fn at(address: &SocketAddr) -> Self {
        if address.ip().is_loopback() { Self::LoopbackOpen } else { Self::TokenRequired }
    }
}

/// A request from a principal with the viewer role.
pub(crate) struct Viewer;

/// A request from a program that follows this server.
pub(crate) struct Replica;

/// A request from a principal with the operator role.
pub(crate) struct Operator(pub(crate) Actor);

/// A request from a principal with the admin role.
pub(crate) struct Administrator(pub(crate) Actor);

impl FromRequestParts<Arc<AdminState>> for Viewer {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, admin: &Arc<AdminState>) -> Result<Self, ApiError> {
        authorize(admin, parts, Role::Viewer).await?;
        Ok(Self)
    }
}

impl FromRequestParts<Arc<AdminState>> for Replica {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, admin: &Arc<AdminState>) -> Result<Self, ApiError> {
        authorize(admin, parts, Role::Replica).await?;
        Ok(Self)
    }
}

impl FromRequestParts<Arc<AdminState>> for Operator {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, admin: &Arc<AdminState>) -> Result<Self, ApiError> {
        let principal = authorize(admin, parts, Role::Operator).await?;
        Ok(Self(Actor { name: principal.name, origin: peer(parts).to_string() }))
    }
}

impl FromRequestParts<Arc<AdminState>> for Administrator {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, admin: &Arc<AdminState>) -> Result<Self, ApiError> {
        let principal = authorize(admin, parts, Role::Admin).await?;
        Ok(Self(Actor { name: principal.name, origin: peer(parts).to_string() }))
    }
}

/// Returns the client address of a request.
pub(crate) fn peer(parts: &Parts) -> IpAddr {
    parts.extensions.get().map_or(IpAddr::V4(Ipv4Addr::UNSPECIFIED), |peer: &ClientPeer| peer.address)
}

/// Returns the principal of a request that requires a role. Its connection is not evicted while the request is
/// handled.
async fn authorize(admin: &AdminState, head: &Parts, needed: Role) -> Result<Principal, Problem> {
    let principal = match needed {
        Role::Viewer | Role::Replica => authorize_reader(admin, head, needed).await?,
        Role::Operator | Role::Admin => authenticate(admin, head).await?,
    };
    if !principal.role.permits(needed) {
        let detail = format!(
            "`{}` has the role {}; this requires the role {}",
            principal.name,
            principal.role.name(),
            needed.name()
        );
        return Err(Problem::new(StatusCode::FORBIDDEN, "Not allowed", detail));
    }
    if let Some(connection) = head.extensions.get::<Arc<AdminConnection>>() {
        connection.authorized();
    }
    Ok(principal)
}

fn auth_problem(detail: &str) -> Problem {
    Problem::new(StatusCode::UNAUTHORIZED, "Unauthorized", detail)
}

/// Returns the principal of a token. Wrong tokens are delayed, per source network; a valid token is never delayed by
/// them.
async fn authenticate_token(admin: &AdminState, head: &Parts, token: &str) -> Result<Principal, Problem> {
    let control = admin.control()?;
    let peer = peer(head);
    let attempt = || {
        admin.throttle.begin(peer).map_err(|wait| {
            let detail = format!("too many wrong tokens from {peer}; retry in {} s", wait.as_secs());
            Problem::new(StatusCode::TOO_MANY_REQUESTS, "Too many wrong tokens", detail)
        })
    };
    let failed = match control.precheck_token(token).await.map_err(control_problem)? {
        TokenCheck::Expired => return Err(auth_problem("the token has expired or was revoked")),
        TokenCheck::Valid(claimed) => {
            let found = control.verify_token(claimed).await.map_err(control_problem)?;
            return found.ok_or_else(|| auth_problem("the token is wrong"));
        }
        TokenCheck::Unverified(claimed) => {
            let attempt = attempt()?;
            if let Some(principal) = control.verify_token(claimed).await.map_err(control_problem)? {
                return Ok(principal);
            }
            attempt
        }
        TokenCheck::Invalid => attempt()?,
    };
    failed.failed().await;
    Err(auth_problem("the token is wrong, has expired or was revoked"))
}

/// Returns the principal of a client certificate, if one was presented.
fn certified(admin: &AdminState, head: &Parts) -> Option<Result<Principal, Problem>> {
    let names = &head.extensions.get::<ClientPeer>()?.names;
    let role = |name: &String| Some(Principal { name: name.clone(), role: *admin.roles.get(name)? });
    let found = names.iter().find_map(role).ok_or_else(|| {
        let shown: String = names.join(", ").chars().take(200).collect();
        let detail = format!(
            "no name of the client certificate has a role; add one of them to `admin_roles`: {shown}"
        );
        Problem::new(StatusCode::FORBIDDEN, "Not allowed", detail)
    });
    (!names.is_empty()).then_some(found)
}

/// The credentials that a request carries.
enum Credentials<'h> {
    Token(&'h str),
    Certificate(Result<Principal, Problem>),
    /// A browser session: the id of its token.
    Session(String),
    /// No credentials, on an address where none may be needed.
    Loopback,
    None,
}

fn credentials<'h>(admin: &AdminState, head: &'h Parts) -> Result<Credentials<'h>, Problem> {
    if let Some(given) = head.headers.get(AUTHORIZATION) {
        let token = given.to_str().ok().and_then(|given| {
            let (scheme, token) = given.split_once(' ')?;
            scheme.eq_ignore_ascii_case("bearer").then(|| token.trim())
        });
        return token.map(Credentials::Token).ok_or_else(|| {
            auth_problem("malformed Authorization header; send `Authorization: Bearer TOKEN`")
        });
    }
    if let Some(found) = certified(admin, head) {
        return Ok(Credentials::Certificate(found));
    }
    if let Some(token) = admin.sessions.token(head) {
        proven_same_origin(head)?;
        return Ok(Credentials::Session(token));
    }
    let near = admin.auth_mode == AuthMode::LoopbackOpen && is_loopback_name(head);
    Ok(if near { Credentials::Loopback } else { Credentials::None })
}

/// Returns the principal of a request, with its role from the database.
async fn authenticate(admin: &AdminState, head: &Parts) -> Result<Principal, Problem> {
    match credentials(admin, head)? {
        Credentials::Token(token) => return authenticate_token(admin, head, token).await,
        Credentials::Certificate(found) => return found,
        Credentials::Session(token) => {
            let found = admin.control()?.principal(&token).await.map_err(control_problem)?;
            return found.ok_or_else(|| {
                auth_problem("the token of this session has expired or was revoked; log in again")
            });
        }
        Credentials::Loopback => {
            let had_tokens = match &admin.control {
                Some(control) => control.had_tokens().await.map_err(control_problem)?,
                None => false,
            };
            if !had_tokens {
                return Ok(loopback(Role::Admin));
            }
        }
        Credentials::None => {}
    }
    Err(auth_problem(
        "missing token; send `Authorization: Bearer TOKEN` and create tokens with `tollgate token create`",
    ))
}

fn loopback(role: Role) -> Principal {
    Principal { name: "loopback".to_owned(), role }
}

/// Returns the principal of a read-only request of a viewer.
pub(crate) async fn authorize_viewer(admin: &AdminState, head: &Parts) -> Result<Principal, Problem> {
    authorize_reader(admin, head, Role::Viewer).await
}

/// Returns the principal of a read-only request. While the database is unavailable, recently authenticated principals
/// keep read access: an outage is when operators most need it, and programs that follow the server need no database.
async fn authorize_reader(admin: &AdminState, head: &Parts, needed: Role) -> Result<Principal, Problem> {
    // Operators and administrators are viewers meanwhile, which says nothing about what else they may read.
    let cached = || cached_principal(admin, head).filter(|known| known.role.permits(needed));
    if admin.control.as_ref().is_some_and(|control| control.is_unavailable())
        && let Some(known) = cached()
    {
        return Ok(known);
    }
    match authenticate(admin, head).await {
        Err(unavailable) if unavailable.status == StatusCode::SERVICE_UNAVAILABLE => {
            cached().ok_or(unavailable)
        }
        other => other,
    }
}

/// Returns whether a subscriber is still authorized. A database that does not respond within `timeout` counts as
/// unavailable.
pub(crate) async fn may_still_view(admin: &AdminState, head: &Parts, timeout: Duration) -> bool {
    match tokio::time::timeout(timeout, authorize_viewer(admin, head)).await {
        Ok(found) => found.is_ok(),
        Err(_) => cached_principal(admin, head).is_some(),
    }
}

fn cached_principal(admin: &AdminState, head: &Parts) -> Option<Principal> {
    let control = admin.control.as_ref()?;
    match credentials(admin, head).ok()? {
        Credentials::Token(token) => control.cached_principal(token),
        Credentials::Session(token) => control.cached_principal_by_id(&token),
        Credentials::Loopback => control.cached_no_tokens().then(|| loopback(Role::Viewer)),
        Credentials::Certificate(_) | Credentials::None => None,
    }
}

/// Returns whether the client addressed a loopback name.
fn is_loopback_name(head: &Parts) -> bool {
    head.headers.get(HOST).and_then(|host| host.to_str().ok()).is_some_and(same_site::is_loopback_host)
}

/// Rejects requests that a browser sends on behalf of another site.
pub(crate) fn reject_cross_site(head: &Parts) -> Result<(), Problem> {
    same_site::reject_cross_site(&head.headers)
}

/// Browsers attach cookies to any request, so a change must carry proof of its origin; all browsers send it.
fn proven_same_origin(head: &Parts) -> Result<(), Problem> {
    let has_origin = head.headers.contains_key(ORIGIN) || head.headers.contains_key("sec-fetch-site");
    if head.method.is_safe() || has_origin {
        return Ok(());
    }
    let detail = "a change with a session cookie requires the header `Origin`; programs send `Authorization: Bearer TOKEN`";
    Err(Problem::new(StatusCode::FORBIDDEN, "Cross-site request", detail))
}
