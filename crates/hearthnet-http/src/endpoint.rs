//! The `/metrics` route, and a server for processes that use HTTP for nothing else.

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

/// State of a host, served at `/healthz`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(clippy::exhaustive_enums)] // Each maps to a status code and a word.
pub enum Health {
    /// Not serving yet, for example while weights are loaded.
    Starting,
    Serving,
    /// Shutting down; accepts no new work.
    Leaving,
}

/// Serves `/metrics` and `/healthz` of this process. Must be called within a Tokio runtime.
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

/// Route for `/metrics`.
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
