//! Node that the page is of, and what the page changes about it.

use std::sync::Arc;

use hearthnet_bus::log::Level;
use hearthnet_orchestrator::Service;
use serde::Serialize;

use super::plans::Plans;
use crate::cli::Failure;
use crate::config::Config;
use crate::home::{Home, OwnHours, Paused};
use crate::node::DaemonNode;

/// Node that the page is of.
pub(crate) struct PageNode {
    pub(crate) home: Home,
    pub(crate) config: Config,
    pub(crate) node: Arc<DaemonNode>,
    pub(crate) pause: Arc<dyn Pause>,
}

/// When the node serves no layers to others, by the owner's wish.
pub(crate) trait Pause: Send + Sync {
    fn state(&self) -> PauseState;
    /// Sets or ends the owner's request. Blocks on the disk.
    fn set(&self, request: Option<Paused>) -> Result<(), Failure>;
    fn quiet_hours(&self) -> QuietState;
    /// Sets the owner's quiet hours; `None`: as configured. Blocks on the disk.
    fn set_quiet_hours(&self, own: Option<OwnHours>) -> Result<(), Failure>;
}

/// Whether the node serves layers to others, as in `/hearthnet/v1/state`.
#[derive(Debug, Default, Serialize)]
pub(crate) struct PauseState {
    /// The owner has paused it.
    pub(crate) paused: bool,
    /// Why nothing is served to others now, whatever the cause: `quiet hours until 07:00`.
    pub(crate) pause_reason: Option<String>,
}

/// Hours of each day in which nothing is served to others, as in `/hearthnet/v1/state`: texts as
/// in the configuration.
#[derive(Debug, Serialize)]
pub(crate) struct QuietState {
    /// Hours that are in force.
    pub(crate) hours: String,
    pub(crate) configured: String,
    /// The owner has set hours on the page.
    pub(crate) is_own: bool,
}

/// Changes of members that a client may make, as in `/hearthnet/v1/state`.
#[derive(Debug, Default)]
pub(super) struct MayChange {
    /// Levels from which and to which it may change other members.
    pub(super) levels: Vec<Level>,
    /// The root key, which changes anchors, is sealed.
    pub(super) needs_passphrase: bool,
}

/// State of all calls of the page.
pub(super) struct Page {
    pub(super) service: Service,
    /// `None` if this process answers without a community.
    pub(super) node: Option<PageNode>,
    pub(super) plans: Arc<Plans>,
    /// Whether all clients that reach the calls have shown a key.
    pub(super) has_key: bool,
}
