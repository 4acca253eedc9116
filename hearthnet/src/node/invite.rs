//! New invites: the code, and the change that makes it valid.

use std::net::SocketAddr;
use std::time::Duration;

use hearthnet_bus::NodeId;
use hearthnet_bus::invite::{Invite, MAX_HINTS};
use hearthnet_bus::log::Level;

use super::addresses::{DEFAULT_PORT, reachable};
use super::log_writer::Change;
use crate::cli::Failure;
use crate::config::Config;
use crate::home::{Home, now_ms};

/// Invite that is not in the log yet.
pub(crate) struct NewInvite {
    pub(crate) code: Invite,
    pub(crate) change: Change,
    /// True if this node runs, so that nodes can join through it.
    pub(crate) live: bool,
}

impl NewInvite {
    /// Code for `uses` nodes that join as `level` within the time `valid`. The caller checks the
    /// right to invite.
    pub(crate) fn generate(
        home: &Home,
        config: &Config,
        level: Level,
        uses: u32,
        valid: Duration,
    ) -> Result<Self, Failure> {
        let now = now_ms();
        let valid = u64::try_from(valid.as_millis()).unwrap_or(u64::MAX);
        let expires_s = now.saturating_add(valid) / 1000;
        let (hints, live) = hints(home, config, now);
        let code =
            Invite::generate(home.log.community(), expires_s, hints).map_err(Failure::internal)?;
        let change = Change::Invite {
            invite: code.key().id(),
            level,
            uses,
            expires_ms: expires_s.saturating_mul(1000),
        };
        Ok(Self { code, change, live })
    }
}

/// Addresses of nodes that can admit, this one first, and whether this node runs.
fn hints(home: &Home, config: &Config, now: u64) -> (Vec<SocketAddr>, bool) {
    let state = home.state();
    let own = home.key.id();
    let of = |node: &NodeId| -> Vec<SocketAddr> {
        let told = state.endpoints_of(node, now).to_vec();
        told.iter().filter_map(|at| at.parse().ok()).collect()
    };
    let mut hints = of(&own);
    let live = !hints.is_empty();
    if !live {
        // Expected address, if no other program takes the port.
        let listen = config.node.listen.parse();
        let listen = listen.unwrap_or(SocketAddr::from(([0, 0, 0, 0], DEFAULT_PORT)));
        if listen.port() != 0 {
            hints.extend(reachable(listen));
        }
    }
    for (node, _) in state.members() {
        if *node != own && state.level(node) >= Some(Level::Trusted) {
            hints.extend(of(node));
        }
    }
    hints.truncate(MAX_HINTS);
    (hints, live)
}
