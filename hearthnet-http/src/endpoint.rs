//! `/metrics`, wherever it is served, and the server of a process that serves nothing else on HTTP.

use axum::Router;
use axum::body::Body;
use axum::extract::State;
use axum::http::{HeaderValue, Response, StatusCode, header};
use axum::routing::{MethodRouter, get};
use serde_json::json;
use tokio::sync::watch;

use crate::error::json_response;
use crate::metrics::Metrics;
use crate::server::{HttpError, HttpServer, HttpSettings};

/// What `/healthz` of a host says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(clippy::exhaustive_enums)] // Each has its status and its word.
pub enum Health {
    /// It does not serve yet: weights are loaded, say.
    Starting,
    /// It serves.
    Serving,
    /// It takes nothing new.
    Leaving,
}

/// Serves the numbers of this process, and how it is, and nothing else. Must be called within a Tokio
/// runtime.
///
/// # Errors
/// [`HttpError`].
pub async fn serve_metrics(
    metrics: Metrics,
    health: watch::Receiver<Health>,
    settings: &HttpSettings,
) -> Result<HttpServer, HttpError> {
    let inner = Router::new().route("/metrics", metrics_route(metrics));
    HttpServer::open(inner, get(well).with_state(health), settings).await
}

/// What answers at `/metrics`.
pub fn metrics_route(metrics: Metrics) -> MethodRouter {
    get(numbers).with_state(metrics)
}

async fn numbers(State(metrics): State<Metrics>) -> Response<Body> {
    let mut response = Response::new(Body::from(metrics.render()));
    let kind = HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8");
    response.headers_mut().insert(header::CONTENT_TYPE, kind);
    response
}

async fn well(State(health): State<watch::Receiver<Health>>) -> Response<Body> {
    let (status, word) = match *health.borrow() {
        Health::Serving => (StatusCode::OK, "ok"),
        Health::Starting => (StatusCode::SERVICE_UNAVAILABLE, "starting"),
        Health::Leaving => (StatusCode::SERVICE_UNAVAILABLE, "shutting_down"),
    };
    json_response(status, &json!({"status": word}))
}
