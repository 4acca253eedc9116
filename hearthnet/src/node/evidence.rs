//! Fetches sealed evidence of a dispute from its accuser or from another anchor
//! (`specs/disputes.md` 5).

use std::time::Duration;

use hearthnet_bus::NodeId;
use hearthnet_bus::log::{Case, Community, Dispute, Level};
use hearthnet_bus::node::Node;
use hearthnet_bus::node::weights::MAX_DATA_BYTES;
use hearthnet_bus::sealed::{MAX_SEALED_BYTES, hash_of};
use tokio::time::timeout;

/// How long one member may take for all pieces: 36 MiB at 1 MiB/s, which is the lowest pace.
const PATIENCE: Duration = Duration::from_secs(60);

/// Returns whether a node may judge a dispute.
pub(crate) fn may_judge(state: &Community, node: &NodeId, case: &Case) -> bool {
    state.level(node) == Some(Level::Anchor) && !case.is_party(node)
}

/// Open disputes that a node may judge.
pub(crate) fn to_judge<'a>(
    state: &'a Community,
    node: &'a NodeId,
) -> impl Iterator<Item = (&'a [u8; 32], &'a Case)> {
    state
        .disputes()
        .filter(|(_, case)| state.outcome(case).is_none() && may_judge(state, node, case))
}

/// Fetches and checks the evidence of a dispute. `None` if no member that could have it serves it.
pub(crate) async fn fetch(node: &Node, state: &Community, case: &Case) -> Option<Vec<u8>> {
    let judges = state.members().map(|(judge, _)| *judge);
    let judges = judges.filter(|judge| may_judge(state, judge, case));
    let holders = std::iter::once(case.accuser).chain(judges);
    for holder in holders.filter(|holder| *holder != node.id()) {
        let fetched = timeout(PATIENCE, fetch_from(node, &holder, &case.dispute)).await;
        match fetched {
            Ok(Some(sealed)) => return Some(sealed),
            _ => {
                let holder = holder.short();
                tracing::debug!(%holder, "a member does not serve the evidence of a dispute");
            }
        }
    }
    None
}

async fn fetch_from(node: &Node, holder: &NodeId, dispute: &Dispute) -> Option<Vec<u8>> {
    // The log bounds it, but a later version may allow more.
    let length = usize::try_from(dispute.evidence_bytes).ok()?;
    if length > MAX_SEALED_BYTES {
        return None;
    }
    let peer = node.weights_of(holder).await.ok()?;
    let mut sealed = Vec::new();
    for index in 0.. {
        let piece = peer.piece(&dispute.evidence, index).await.ok()??;
        sealed.extend_from_slice(&piece);
        if sealed.len() >= length || piece.len() != MAX_DATA_BYTES {
            break;
        }
    }
    let is_it = sealed.len() == length && hash_of(&sealed) == dispute.evidence;
    is_it.then_some(sealed)
}
