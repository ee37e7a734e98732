//! `GET /admin/v1/openapi.json`: what all paths take and answer, for programs. The document is a file beside this one; what is
//! told of it are the paths that there are.

use super::routes::{Asked, Reply, Route, whole};
use crate::http::json_answer;
use crate::http::problem::Problem;
use hyper::StatusCode;
use serde_json::Value;
use std::sync::LazyLock;

pub(super) const ROUTES: &[Route] = &[Route::open("/admin/v1/openapi.json", |_: Asked| Box::pin(tell()))];

static TOLD: LazyLock<Vec<u8>> = LazyLock::new(|| {
    let mut document = document();
    if let Some(paths) = document["paths"].as_object_mut() {
        paths.retain(|path, operations| {
            let Some(operations) = operations.as_object_mut() else { return false };
            operations.retain(|method, _| {
                let mut all = super::ROUTES.iter().copied().flatten();
                all.any(|route| route.path == path && route.method.as_str().eq_ignore_ascii_case(method))
            });
            !operations.is_empty()
        });
    }
    format!("{document:#}\n").into_bytes()
});

fn document() -> Value {
    serde_json::from_str(include_str!("openapi.json")).unwrap_or_default()
}

async fn tell() -> Result<Reply, Problem> {
    Ok(whole(json_answer(StatusCode::OK, TOLD.clone())))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whoever adds a path writes in `openapi.json` what it takes and answers.
    #[test]
    fn every_path_is_described_with_its_role() {
        let document = document();
        for route in super::super::ROUTES.iter().copied().flatten() {
            let method = route.method.as_str().to_lowercase();
            let found = &document["paths"][route.path][&method];
            assert!(found.is_object(), "{method} {} is not in openapi.json", route.path);
            let role = route.role.map_or("anybody", tollgate_control::Role::name);
            assert_eq!(found["x-role"], role, "{method} {}", route.path);
        }
        let told: Value = serde_json::from_slice(&TOLD).expect("JSON");
        let told = told["paths"].as_object().expect("paths").values();
        let told: usize = told.map(|operations| operations.as_object().map_or(0, serde_json::Map::len)).sum();
        assert_eq!(
            told,
            super::super::ROUTES.iter().copied().flatten().count(),
            "and no path that is not there"
        );
    }
}
