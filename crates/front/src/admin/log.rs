//! `GET`, `PUT /admin/v1/log`: which messages the process writes, changed while it runs.

use super::routes::{Asked, Reply, Route, whole};
use crate::http::problem::Problem;
use crate::http::{body, json_answer};
use hyper::{Method, StatusCode};
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::json;
use std::collections::BTreeMap;
use tollgate_control::Role;

/// From which level on messages are written.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct LogSettings {
    /// error, warn, info, debug, trace or off.
    pub level: String,
    /// Modules with a level of their own.
    pub modules: BTreeMap<String, String>,
}

/// What is to be changed: the level of all, of single modules, or both.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Wanted {
    /// As it is, unless said.
    #[serde(default, deserialize_with = "given")]
    level: Option<String>,
    #[serde(default, deserialize_with = "given")]
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

const PATH: &str = "/admin/v1/log";

pub(super) const ROUTES: &[Route] = &[
    Route::new(Method::GET, PATH, Role::Viewer, |asked| Box::pin(get(asked))),
    Route::new(Method::PUT, PATH, Role::Operator, |asked| Box::pin(put(asked))),
];

async fn get(asked: Asked) -> Result<Reply, Problem> {
    Ok(told(&*asked.admin.log))
}

async fn put(asked: Asked) -> Result<Reply, Problem> {
    let Asked { admin, body, actor, .. } = asked;
    let body = body::read(body).await?;
    let wanted = match body::decode(&body)? {
        Wanted { level: None, modules: None } => {
            return Err(Problem::bad("write `level`, `modules` or both"));
        }
        Wanted { level, modules } => LogSettings {
            level: level.unwrap_or_else(|| admin.log.now().level),
            modules: modules.unwrap_or_default(),
        },
    };
    admin.log.change(wanted).map_err(|(place, detail)| {
        Problem::new(StatusCode::UNPROCESSABLE_ENTITY, "It cannot act", detail).at(place)
    })?;
    let now = admin.log.now();
    tracing::warn!(by = actor.name, level = now.level, modules = ?now.modules, "the log level was changed");
    Ok(told(&*admin.log))
}

fn told(log: &dyn LogLevels) -> Reply {
    whole(json_answer(StatusCode::OK, format!("{:#}\n", json!(log.now())).into_bytes()))
}
