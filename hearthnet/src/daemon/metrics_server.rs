//! Prometheus metrics of a host, on their own listener if configured.

use std::time::Duration;

use hearthnet_http::{Health, HttpServer, Part, serve_metrics};
use tokio::sync::watch;

use crate::answering::http::{count, http_failure, http_settings, unless_taken};
use crate::cli::Failure;
use crate::config::Config;

/// Time limit for requests in progress when the program ends.
const CLOSE_DEADLINE: Duration = Duration::from_millis(200);

/// Server of `/metrics` and `/healthz`, if configured.
pub(crate) struct MetricsServer {
    server: Option<HttpServer>,
    /// Health that `/healthz` reports; other parts set it, too.
    pub(crate) health: watch::Sender<Health>,
}

impl MetricsServer {
    /// Disabled server.
    pub(crate) fn closed() -> Self {
        Self {
            server: None,
            health: watch::Sender::new(Health::Starting),
        }
    }

    /// Opens the listener of `flag`, else of the configuration, and starts to count. If the
    /// configured port is taken, for example by another host on this machine, continues without it.
    ///
    /// # Errors
    /// Returns an error if the listener cannot be opened, or must not be.
    pub(crate) async fn open(flag: Option<&str>, config: &Config) -> Result<Self, Failure> {
        let listen = flag.unwrap_or(&config.metrics.listen);
        if listen.is_empty() {
            return Ok(Self::closed());
        }
        let (health, watched) = watch::channel(Health::Starting);
        let settings = http_settings(listen, config)?;
        let server = serve_metrics(count(Part::Host)?, watched, &settings).await;
        let server = server.map_err(|error| http_failure(&error, "--metrics"));
        let server = unless_taken(server, flag.is_some(), "metrics for Prometheus")?;
        Ok(Self { server, health })
    }

    pub(crate) fn url(&self) -> Option<String> {
        let server = self.server.as_ref()?;
        Some(format!("{}/metrics", server.url()))
    }

    pub(crate) async fn close(self) {
        if let Some(server) = self.server {
            server.shutdown(CLOSE_DEADLINE).await;
        }
    }
}
