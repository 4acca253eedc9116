//! Connecting to a node at one of its addresses, and calling it.

use std::future::Future;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use futures_util::stream::{FuturesUnordered, StreamExt as _};
use hearthnet_transport::{CloseCode, ConnectError, PathRule, PeerSocket, connect_path};
use serde_json::Value;

use super::access::Use;
use super::shared::Inner;
use super::weights::{self, WeightsError, WeightsPeer};
use super::{Node, bus_rule};
use crate::node::calls::{CallError, CallStream, Client, Code, Origin, Wire};
use crate::{Capability, NodeId};

/// Delay before the next address is tried in parallel (as in Happy Eyeballs, RFC 8305).
const STAGGER: Duration = Duration::from_millis(250);

/// Runs `attempt` for all `candidates`, starting each 250 ms after the one before it, or as soon as
/// an attempt has failed. Returns the first success, or the error of each in the order of failure.
///
/// # Errors
/// The errors, if all attempts fail.
pub async fn first_of<C: Copy, T, E, F: Future<Output = Result<T, E>>>(
    candidates: impl IntoIterator<Item = C>,
    mut attempt: impl FnMut(C) -> F,
) -> Result<(C, T), Vec<(C, E)>> {
    let mut waiting = candidates.into_iter();
    let mut running = FuturesUnordered::new();
    let mut failed = Vec::new();
    loop {
        if let Some(candidate) = waiting.next() {
            let attempt = attempt(candidate);
            running.push(async move { (candidate, attempt.await) });
        } else if running.is_empty() {
            return Err(failed);
        }
        let ended = match waiting.size_hint() {
            (0, Some(0)) => running.next().await,
            _ => match tokio::time::timeout(STAGGER, running.next()).await {
                Ok(ended) => ended,
                Err(_) => continue,
            },
        };
        match ended {
            Some((candidate, Ok(made))) => return Ok((candidate, made)),
            Some((candidate, Err(error))) => failed.push((candidate, error)),
            None => {}
        }
    }
}

impl Inner {
    /// Connects to a node at any of its addresses. Returns the error of each address if all fail.
    pub(super) async fn reach(
        &self,
        node: NodeId,
        rule: &PathRule,
    ) -> Result<PeerSocket, Vec<(SocketAddr, ConnectError)>> {
        let endpoints = self.discovery.dialable(&node);
        let reached = first_of(endpoints, async |endpoint: SocketAddr| {
            let addr = endpoint.to_string();
            let config = &self.settings.transport;
            connect_path(&addr, &self.identity, Some(node), rule, config).await
        })
        .await;
        match reached {
            Ok((endpoint, socket)) => {
                self.discovery.proved(node, endpoint);
                Ok(socket)
            }
            Err(failed) => {
                for (endpoint, error) in &failed {
                    tracing::debug!(node = %node.short(), %endpoint, %error, "could not connect");
                    // A node that refuses has answered: the address is right.
                    if !matches!(error, ConnectError::Refused { .. }) {
                        self.discovery.failed(Some(&node), *endpoint);
                    }
                }
                Err(failed)
            }
        }
    }

    /// Refuses a node that is not a member, as far as this node knows.
    fn check_member(&self, node: NodeId) -> Result<(), CallError> {
        let state = self.log.state();
        match state.is_created() && state.level(&node).is_none() {
            false => Ok(()),
            true => {
                let message = format!("{node} is not a member of this community");
                Err(CallError::new(Code::UNAUTHORIZED, message))
            }
        }
    }

    async fn client(&self, to: NodeId) -> Result<Client, CallError> {
        self.check_member(to)?;
        if to == self.id {
            // A call to this node itself needs no socket; all checks still apply.
            let (ours, theirs) = Wire::pair();
            let server = Arc::clone(&self.server);
            self.spawn(async move { server.serve_wire(theirs, Origin::Peer(to)).await });
            return Ok(Client::over(ours, Arc::clone(&self.key), to));
        }
        let socket = self
            .reach(to, &bus_rule())
            .await
            .map_err(|failed| unreachable(to, &failed))?;
        self.connections.add(to, Use::Bus, socket.closer(), true);
        Ok(Client::new(socket, Arc::clone(&self.key)))
    }
}

/// Error message for a node that could not be connected.
fn unreachable(node: NodeId, failed: &[(SocketAddr, ConnectError)]) -> CallError {
    let refused = failed.iter().find_map(|(_, error)| error.code());
    if let Some(code @ (CloseCode::Unauthorized | CloseCode::Revoked)) = refused {
        let message = format!("{node} does not admit this node: {code}");
        return CallError::new(Code::UNAUTHORIZED, message);
    }
    let (message, hint) = match failed.first() {
        None => (
            format!("no address of {node} is known"),
            "is it switched on, and on this network? Networks without multicast need static peers",
        ),
        Some((endpoint, error)) => (
            format!("{node} could not be reached: {endpoint}: {error}"),
            "is it switched on, and on this network?",
        ),
    };
    CallError::new(Code::UNREACHABLE, message).with_hint(hint)
}

impl Node {
    /// Begins a call over its own connection, which ends with the call. The stream yields the
    /// events and the result.
    ///
    /// # Errors
    /// `unreachable` if no connection can be made; `unauthorized` if one of the two nodes is not a
    /// member for the other; and as [`Client::call`].
    pub async fn call(
        &self,
        to: NodeId,
        capability: &Capability,
        params: &Value,
    ) -> Result<CallStream, CallError> {
        self.inner.client(to).await?.call(capability, params)
    }

    /// Connects to a member for its weights.
    ///
    /// # Errors
    /// The errors of a connection: see [`WeightsError`].
    pub async fn weights_of(&self, member: &NodeId) -> Result<WeightsPeer, WeightsError> {
        let (inner, member) = (&self.inner, *member);
        inner.check_member(member).map_err(WeightsError::Connect)?;
        let reached = inner.reach(member, &weights::path_rule()).await;
        let socket = reached.map_err(|failed| {
            let refusal = failed.iter().find_map(|(_, error)| match error {
                ConnectError::NotServed => Some(WeightsError::NotServed),
                ConnectError::Refused { code, .. } => match code {
                    CloseCode::PurposeUnknown => Some(WeightsError::NotServed),
                    CloseCode::SessionLimit => Some(WeightsError::Busy),
                    _ => None,
                },
                _ => None,
            });
            refusal.unwrap_or_else(|| WeightsError::Connect(unreachable(member, &failed)))
        })?;
        let closer = socket.closer();
        inner.connections.add(member, Use::Weights, closer, true);
        Ok(WeightsPeer::new(socket, Arc::clone(&inner.access.weights)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn the_first_that_works_is_taken_and_the_slow_do_not_hold_it_up() {
        let begin = tokio::time::Instant::now();
        let taken = first_of([1, 2, 3], async |candidate: u64| match candidate {
            1 => {
                tokio::time::sleep(Duration::from_secs(60)).await;
                Err("slow")
            }
            2 => Err("broken"),
            _ => Ok("made"),
        })
        .await;
        assert_eq!(taken, Ok((3, "made")));
        assert_eq!(begin.elapsed(), STAGGER);
        let failed = first_of([1, 2], async |_| Err::<(), _>("broken")).await;
        assert_eq!(failed, Err(vec![(1, "broken"), (2, "broken")]));
        let nobody = first_of([0u8; 0], async |_| Ok::<_, ()>(())).await;
        assert_eq!(nobody, Err(vec![]));
    }
}
