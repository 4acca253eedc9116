//! Address, identity and session tokens of the victim.

use std::net::SocketAddr;
use std::sync::Arc;

use hearthnet_bus::calls::{Client, ShardGrant};
use hearthnet_bus::node::bus_rule;
use hearthnet_bus::{Capability, Grant, NodeId, NodeKey};
use hearthnet_transport::{Config, connect_path};
use serde_json::json;

use crate::victim::MODEL_ID;
use crate::{HarnessError, Result};

/// Lifetime of the harness's tokens, in seconds.
const TOKEN_SECONDS: u64 = 600;

/// Address of the victim, and the layers that it serves.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Target {
    pub(crate) addr: SocketAddr,
    pub(crate) node: NodeId,
    /// Identity of its weights.
    pub(crate) weights: [u8; 32],
    /// First and last layer.
    pub(crate) layers: (u32, u32),
    /// Values per row.
    pub(crate) width: u32,
    /// Whether the victim issues session tokens itself, as hosts of a community do.
    pub(crate) grants: bool,
}

impl Target {
    /// Session token for the node with this key: issued by the host, or signed by the node itself.
    ///
    /// # Errors
    /// If the host does not issue one.
    pub(crate) async fn token(&self, key: &NodeKey) -> Result<Vec<u8>> {
        if !self.grants {
            return token(key, self.node);
        }
        let (lo, hi) = self.layers;
        let params = json!({ "shard_id": format!("{MODEL_ID}:{lo}-{hi}") });
        let client = self.client(key).await?;
        let call = client.call(&Capability::shard_serve(), &params)?;
        let granted: ShardGrant = serde_json::from_value(call.result().await?)?;
        let no_token = || HarnessError::honest("what it is granted is no token");
        granted.token().ok_or_else(no_token)
    }

    /// Opens a call socket of the node with this key.
    pub(crate) async fn client(&self, key: &NodeKey) -> Result<Client> {
        let (identity, addr) = (key.identity()?, self.addr.to_string());
        let (rule, config) = (bus_rule(), Config::default());
        let socket = connect_path(&addr, &identity, Some(self.node), &rule, &config).await?;
        let key = Arc::new(NodeKey::from_secret(&key.secret()));
        Ok(Client::new(socket, key))
    }
}

/// Session token signed by its own bearer, for one node and a single use.
pub(crate) fn token(key: &NodeKey, audience: NodeId) -> Result<Vec<u8>> {
    Ok(grant(key, audience)?.sign(key)?)
}

/// Content of such a token.
pub(crate) fn grant(key: &NodeKey, audience: NodeId) -> Result<Grant> {
    let id = key.id();
    Ok(Grant::of_session(id, id, audience, TOKEN_SECONDS)?)
}
