//! What is used of a caller's limits: read without charging, given back, and added to once.

use super::meant::Meant;
use super::routes::{Asked, Reply, Route, done, whole};
use super::{problem, query};
use crate::http::problem::Problem;
use crate::http::{body, json_answer};
use hyper::{Method, StatusCode};
use serde::Deserialize;
use serde_json::{Value, json};
use std::future::Future;
use std::pin::Pin;
use tollgate_control::{GrantDraft, QuotaProblem, Role, rfc3339};
use tollgate_core::CounterStore;
use tollgate_engine::{Left, Limiter, Needs, Usage, UsageError, Used, Window};
use tollgate_rules::{Role as LimitRole, TENANT_KEY};

const ONE: &str = "/admin/v1/usage/{api_key}";

pub(super) const ROUTES: &[Route] = &[
    Route::new(Method::GET, ONE, Role::Viewer, |asked| Box::pin(get(asked))),
    Route::new(Method::POST, "/admin/v1/usage/{api_key}/reset", Role::Operator, |asked| {
        Box::pin(reset(asked))
    }),
    Route::new(Method::POST, "/admin/v1/usage/{api_key}/grant", Role::Operator, |asked| {
        Box::pin(grant(asked))
    }),
    Route::new(Method::GET, "/admin/v1/usage/by-id/{id}", Role::Viewer, |asked| Box::pin(get(asked))),
    Route::new(Method::POST, "/admin/v1/usage/by-id/{id}/reset", Role::Operator, |asked| {
        Box::pin(reset(asked))
    }),
    Route::new(Method::POST, "/admin/v1/usage/by-id/{id}/grant", Role::Operator, |asked| {
        Box::pin(grant(asked))
    }),
    Route::new(Method::DELETE, "/admin/v1/usage/{api_key}/grant/{id}", Role::Operator, |asked| {
        Box::pin(revoke(asked))
    }),
    Route::new(Method::DELETE, "/admin/v1/usage/by-id/{id}/grant/{grant}", Role::Operator, |asked| {
        Box::pin(revoke(asked))
    }),
];

/// Whose limits are meant, and which of them.
pub struct UsageOf {
    /// The domain, where there are several.
    pub domain: Option<String>,
    /// The caller, and what else requests say that meet the limits.
    pub attributes: Vec<(String, String)>,
    /// Only this rule's.
    pub rule: Option<String>,
}

/// What is told, or why it cannot be.
pub type Reading<'a> = Pin<Box<dyn Future<Output = Result<Usage, UsageError>> + Send + 'a>>;

/// Who reads the counters: a limiter over whatever store.
pub trait Meter: Send + Sync {
    /// What is used.
    fn usage<'a>(&'a self, of: &'a UsageOf) -> Reading<'a>;
    /// Gives it back, and tells what there is then.
    fn reset<'a>(&'a self, of: &'a UsageOf) -> Reading<'a>;
}

impl<S: CounterStore> Meter for Limiter<S> {
    fn usage<'a>(&'a self, of: &'a UsageOf) -> Reading<'a> {
        Box::pin(async move {
            let attributes: Vec<(&str, &str)> = of.pairs();
            Self::usage(self, of.domain.as_deref(), &attributes, of.rule.as_deref()).await
        })
    }

    fn reset<'a>(&'a self, of: &'a UsageOf) -> Reading<'a> {
        Box::pin(async move {
            let attributes: Vec<(&str, &str)> = of.pairs();
            Self::reset(self, of.domain.as_deref(), &attributes, of.rule.as_deref()).await
        })
    }
}

impl UsageOf {
    fn pairs(&self) -> Vec<(&str, &str)> {
        self.attributes.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect()
    }

    async fn read(asked: &Asked) -> Result<(Meant, Self), Problem> {
        let meant = Meant::by(asked).await?;
        let ([domain], mut attributes) = query::words_and_attributes(&asked.head.uri, ["domain"])?;
        if attributes.iter().any(|(name, _)| name == TENANT_KEY) {
            return Err(Problem::bad("the key stands in the path").at("attr.api_key"));
        }
        attributes.insert(0, (TENANT_KEY.to_owned(), meant.key()?.to_owned()));
        Ok((meant, Self { domain, attributes, rule: None }))
    }
}

async fn get(asked: Asked) -> Result<Reply, Problem> {
    let (meant, of) = UsageOf::read(&asked).await?;
    let usage = asked.admin.meter.usage(&of).await.map_err(unread)?;
    Ok(told(&meant, &usage))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Reset {
    rule: Option<String>,
    reason: String,
}

async fn reset(asked: Asked) -> Result<Reply, Problem> {
    let (meant, mut of) = UsageOf::read(&asked).await?;
    let Asked { admin, body, actor, .. } = asked;
    let sent: Reset = body::decode(&body::read(body).await?)?;
    of.rule = sent.rule;
    let before = admin.meter.usage(&of).await.map_err(unread)?;
    let noted = json!({"limits": before.limits.iter().map(limit).collect::<Vec<_>>()}).to_string();
    let key = meant.key()?;
    let noted = admin.control()?.note_reset(key, of.rule.as_deref(), &sent.reason, noted, &actor).await;
    noted.map_err(problem)?.map_err(unfit)?;
    let usage = admin.meter.reset(&of).await.map_err(unread)?;
    Ok(told(&meant, &usage))
}

async fn grant(asked: Asked) -> Result<Reply, Problem> {
    let meant = Meant::by(&asked).await?;
    let [] = query::words(&asked.head.uri, [])?;
    let Asked { admin, body, actor, .. } = asked;
    let draft: GrantDraft = body::decode(&body::read(body).await?)?;
    let granted = admin.control()?.grant(meant.caller(), draft, &(admin.rules)(), &actor).await;
    let granted = granted.map_err(problem)?.map_err(unfit)?;
    Ok(whole(json_answer(StatusCode::CREATED, format!("{:#}\n", json!(granted)).into_bytes())))
}

async fn revoke(asked: Asked) -> Result<Reply, Problem> {
    let meant = Meant::by(&asked).await?;
    let [] = query::words(&asked.head.uri, [])?;
    asked
        .admin
        .control()?
        .revoke_grant(meant.caller(), &asked.named[1], &asked.actor)
        .await
        .map_err(problem)?;
    Ok(done())
}

pub(super) fn unfit(wrong: QuotaProblem) -> Problem {
    Problem::new(StatusCode::UNPROCESSABLE_ENTITY, "It cannot act", wrong.detail).at(wrong.place)
}

fn unread(error: UsageError) -> Problem {
    match error {
        UsageError::Domain(why) => Problem::bad(why).at("domain"),
        UsageError::Rule(why) => {
            Problem::new(StatusCode::UNPROCESSABLE_ENTITY, "No such rule", why).at("rule")
        }
        error => {
            tracing::warn!(%error, "counters could not be read for an operator");
            let detail = "the store of the counters does not answer. Try again";
            Problem::new(StatusCode::SERVICE_UNAVAILABLE, "Store away", detail)
        }
    }
}

fn told(meant: &Meant, usage: &Usage) -> Reply {
    let mut body = json!({
        "domain": usage.domain,
        "tier": usage.tier,
        "limits": usage.limits.iter().map(limit).collect::<Vec<_>>(),
        "needs": usage.needs.iter().map(needs).collect::<Vec<_>>(),
        "grants": usage.grants.iter().map(left).collect::<Vec<_>>(),
    });
    if let Some(key) = meant.sent() {
        body["api_key"] = key.into();
    }
    whole(json_answer(StatusCode::OK, format!("{body:#}\n").into_bytes()))
}

fn limit(used: &Used) -> Value {
    let (count, capacity) = (used.limit.quota().count, used.limit.capacity());
    let mut told = json!({
        "rule": used.rule,
        "descriptor": used.descriptor,
        "limit": count,
        "window": Window::of(&used.limit).to_string(),
        "algorithm": used.limit.algorithm().name(),
        "used": used.used(),
        "remaining": used.remaining,
        "reset_ms": used.reset_after.ceil_millis(),
        "source": used.source.name(),
    });
    if capacity != count {
        told["burst"] = capacity.into();
    }
    let role = match used.role {
        LimitRole::Live => None,
        LimitRole::Shadow => Some("shadow"),
        LimitRole::Candidate => Some("candidate"),
        LimitRole::Quota => Some("quota"),
    };
    if let Some(role) = role {
        told["role"] = role.into();
    }
    told
}

fn needs(needs: &Needs) -> Value {
    json!({"rule": needs.rule, "descriptor": needs.descriptor, "attributes": needs.attributes})
}

fn left(left: &Left) -> Value {
    json!({
        "id": left.id,
        "rules": left.rules,
        "units": left.units,
        "remaining": left.remaining,
        "expires_at": rfc3339(left.until),
    })
}
