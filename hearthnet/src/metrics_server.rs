//! The numbers of a host, for Prometheus: a door of their own, if it is wanted.

use std::time::Duration;

use hearthnet_http::{Health, HttpServer, Part, serve_metrics};
use tokio::sync::watch;

use crate::config::Config;
use crate::failure::{Failure, Kind};
use crate::output::note;
use crate::service_setup::{count, http_failure, http_settings};

/// How long a request for numbers may still take when the program ends.
const CLOSE_DEADLINE: Duration = Duration::from_millis(200);

/// `/metrics` and `/healthz`, or neither.
pub(crate) struct MetricsServer {
    server: Option<HttpServer>,
    health: watch::Sender<Health>,
}

impl MetricsServer {
    /// No numbers.
    pub(crate) fn closed() -> Self {
        Self {
            server: None,
            health: watch::Sender::new(Health::Starting),
        }
    }

    /// Opens the door that `flag` names, or the configuration; counts from then on. One that
    /// only the configuration names is left shut when its port is taken: another host on this
    /// machine has it.
    ///
    /// # Errors
    /// If it cannot be opened, or must not be.
    pub(crate) async fn open(flag: Option<&str>, config: &Config) -> Result<Self, Failure> {
        let (health, watched) = watch::channel(Health::Starting);
        let listen = flag.unwrap_or(&config.metrics.listen);
        if listen.is_empty() {
            let server = None;
            return Ok(Self { server, health });
        }
        let settings = http_settings(listen, config)?;
        let server = serve_metrics(count(Part::Host)?, watched, &settings).await;
        let server = match server.map_err(|error| http_failure(&error, "--metrics")) {
            Ok(server) => Some(server),
            Err(failure) if flag.is_none() && failure.kind == Kind::Host => {
                note(format!("no numbers for Prometheus: {failure}"));
                None
            }
            Err(failure) => return Err(failure),
        };
        Ok(Self { server, health })
    }

    /// Where the numbers are.
    pub(crate) fn url(&self) -> Option<String> {
        let server = self.server.as_ref()?;
        Some(format!("http://{}/metrics", server.local_addr()))
    }

    /// Through which somebody else says how the host is.
    pub(crate) fn health(&self) -> watch::Sender<Health> {
        self.health.clone()
    }

    /// Says how the host is.
    pub(crate) fn say(&self, health: Health) {
        self.health.send_replace(health);
    }

    /// Closes the door.
    pub(crate) async fn close(self) {
        if let Some(server) = self.server {
            server.shutdown(CLOSE_DEADLINE).await;
        }
    }
}
