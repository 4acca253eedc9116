//! Fixtures of the tests of calls, and of capabilities.

use std::sync::Arc;

use tokio::task::JoinHandle;

use super::{CallServer, Client, Origin, Wire};
use crate::{NodeKey, testing};

pub(crate) fn key(seed: u8) -> Arc<NodeKey> {
    Arc::new(testing::key(seed))
}

/// A client with key `seed`, and the task that serves it. The server's own key calls as an app on
/// its machine.
pub(crate) fn connect(server: &Arc<CallServer>, seed: u8) -> (Client, JoinHandle<()>) {
    let (own, key) = (server.own(), key(seed));
    let (ours, theirs) = Wire::pair();
    let (client, origin) = match own == key.id() {
        true => (Client::local(ours), Origin::Local),
        false => {
            let from = Origin::Peer(key.id());
            (Client::over(ours, key, own), from)
        }
    };
    let server = Arc::clone(server);
    let task = tokio::spawn(async move { server.serve_wire(theirs, origin).await });
    (client, task)
}
