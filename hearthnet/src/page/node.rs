//! Node that the page is of, and what the page changes about it.

use std::sync::Arc;

use hearthnet_orchestrator::Service;
use serde::Serialize;

use crate::cli::Failure;
use crate::config::Config;
use crate::home::{Home, Paused};
use crate::node::DaemonNode;

/// Node that the page is of.
pub(crate) struct PageNode {
    pub(crate) home: Home,
    pub(crate) config: Config,
    pub(crate) node: Arc<DaemonNode>,
    pub(crate) pause: Arc<dyn Pause>,
}

/// Pause of the layers that the node serves to others.
pub(crate) trait Pause: Send + Sync {
    fn state(&self) -> PauseState;
    /// Sets or ends the owner's request. Blocks on the disk.
    fn set(&self, request: Option<Paused>) -> Result<(), Failure>;
}

/// Whether the node serves layers to others, as in `/hearthnet/v1/state`.
#[derive(Debug, Default, Serialize)]
pub(crate) struct PauseState {
    /// The owner has paused it.
    pub(crate) paused: bool,
    /// Why nothing is served to others now, whatever the cause: `quiet hours until 07:00`.
    pub(crate) pause_reason: Option<String>,
}

/// State of all calls of the page.
pub(super) struct Page {
    pub(super) service: Service,
    /// `None` if this process answers without a community.
    pub(super) node: Option<PageNode>,
    /// Whether all clients that reach the calls have shown a key.
    pub(super) has_key: bool,
}
