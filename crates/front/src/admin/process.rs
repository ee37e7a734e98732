//! `GET /healthz`, `/readyz`, `/metrics`: as on the HTTP address, but figures are for those who may read.

use super::routes::{Asked, Reply, Route, whole};
use crate::http::health;
use crate::http::problem::Problem;
use hyper::Method;
use tollgate_control::Role;

pub(super) const ROUTES: &[Route] = &[
    Route::open("/healthz", |asked| Box::pin(tell(asked))),
    Route::open("/readyz", |asked| Box::pin(tell(asked))),
    Route::new(Method::GET, "/metrics", Role::Viewer, |asked| Box::pin(tell(asked))),
];

async fn tell(asked: Asked) -> Result<Reply, Problem> {
    Ok(whole(health::answer(&asked.admin.status, &asked.head.uri, &asked.head.headers).await))
}
