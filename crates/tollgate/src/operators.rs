//! What operators decide, in a server: the database of `--db`, the admin address, and what is told of both.

use crate::config::Config;
use crate::status::ServerStatus;
use crate::store::{Store, metric};
use anyhow::Context;
use serde_json::{Value, json};
use std::future::Future;
use std::net::SocketAddr;
use std::sync::Arc;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tollgate_control::{Control, Following};
use tollgate_core::SystemClock;
use tollgate_engine::{Limiter, Tenants};
use tollgate_front::admin::{self, Admin, Door};

/// Where decisions of operators are kept, and where operators come in.
pub(crate) struct Operators {
    pub(crate) control: Arc<Control>,
    listener: TcpListener,
}

/// What runs until it is told to stop.
pub(crate) struct Running {
    following: JoinHandle<()>,
    serving: JoinHandle<()>,
}

impl Operators {
    /// Opens the database and the address; nothing, where no database is given.
    pub(crate) async fn open(config: &Config) -> anyhow::Result<Option<Self>> {
        let Some(db) = &config.db else { return Ok(None) };
        let control = Control::open(&db.0, Arc::new(SystemClock::new())).await.context("--db")?;
        if Door::at(&config.admin) == Door::Tokens && !control.has_tokens().await.context("--db")? {
            anyhow::bail!(
                "--admin {}: on an address other than loopback everybody needs a token, and there is none; make one \
                 with `tollgate token create --db …`, or listen on 127.0.0.1",
                config.admin
            );
        }
        let listener = TcpListener::bind(config.admin).await;
        let listener =
            listener.with_context(|| format!("cannot listen on {}; set --admin to another", config.admin))?;
        Ok(Some(Self { control, listener }))
    }

    /// What the limiter asks of agreements with callers.
    pub(crate) fn tenants(&self) -> Arc<dyn Tenants> {
        self.control.book()
    }

    pub(crate) fn address(&self) -> anyhow::Result<SocketAddr> {
        Ok(self.listener.local_addr()?)
    }

    /// Lets operators in, and follows what those decide who come in elsewhere.
    pub(crate) fn start(
        self,
        limiter: Arc<Limiter<Store>>,
        status: &Arc<ServerStatus>,
        drain: impl Future<Output = ()> + Send + 'static,
    ) -> anyhow::Result<Running> {
        status.tell_of(Arc::clone(&self.control));
        let following = tokio::spawn(Arc::clone(&self.control).follow(Following::default()));
        let door = Door::at(&self.address()?);
        let rules = Box::new(move || limiter.rules());
        let admin = Admin { control: self.control, rules, status: Arc::clone(status) as _, door };
        let serving = tokio::spawn(admin::serve(self.listener, admin, drain));
        Ok(Running { following, serving })
    }
}

impl Running {
    /// Waits for those who are being answered.
    pub(crate) async fn end(self) {
        let _ = self.serving.await;
        self.following.abort();
    }
}

/// What `/readyz?verbose` says of it.
pub(crate) fn details(control: &Control) -> Value {
    json!({
        "database": control.kind(),
        "revision": control.revision(),
        "quotas": control.book().len(),
        "age_ms": control.age_millis(),
    })
}

/// What `/metrics` says of it.
pub(crate) fn metrics(control: &Control, text: &mut String) {
    let number = |number: i64| u64::try_from(number).unwrap_or(0);
    let quotas = u64::try_from(control.book().len()).unwrap_or(u64::MAX);
    metric(
        text,
        "ratelimit_quotas",
        "gauge",
        "Agreements with single callers that this node knows of.",
        quotas,
    );
    let help = "The last change of operators that acts on this node.";
    metric(text, "ratelimit_control_revision", "gauge", help, number(control.revision()));
    let help = "For how long this node has not been sure to know every change, in milliseconds.";
    metric(text, "ratelimit_control_age_milliseconds", "gauge", help, number(control.age_millis()));
}
