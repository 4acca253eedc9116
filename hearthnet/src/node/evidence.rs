//! Fetches sealed evidence of a dispute from its accuser or from another anchor
//! (`specs/disputes.md` 5).

use std::collections::BTreeSet;
use std::io;
use std::time::Duration;

use hearthnet_bus::NodeId;
use hearthnet_bus::log::{Case, Community, Dispute, Level};
use hearthnet_bus::node::Node;
use hearthnet_bus::node::weights::MAX_DATA_BYTES;
use hearthnet_bus::sealed::MAX_SEALED_BYTES;
use tokio::task::spawn_blocking;
use tokio::time::timeout;

use crate::home::evidence::EvidenceFolder;

/// How long one member is asked for pieces before the next member or dispute has its turn.
const TIMEOUT: Duration = Duration::from_secs(60);
/// Bytes within that time for which the member is asked again before others. The largest evidence
/// then takes 36 turns.
const LEAST_BYTES: u64 = 1 << 20;

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

/// Result of a turn of a transfer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Came {
    /// The evidence is in the folder.
    Whole,
    /// A part has come, and the same member may have more.
    More,
    /// No member serves it at present.
    Nothing,
}

/// Transfer of the evidence of one dispute. What has come is in the folder, so that it goes on
/// there with the next turn, and after a restart.
pub(crate) struct EvidenceFetch {
    folder: EvidenceFolder,
    /// Member that sent the last bytes.
    from: Option<NodeId>,
    /// True once the bytes of several members together were wrong: each member sends all of them.
    alone: bool,
    /// Members that sent wrong bytes.
    wrong: BTreeSet<NodeId>,
}

impl EvidenceFetch {
    pub(crate) fn new(folder: EvidenceFolder) -> Self {
        Self {
            folder,
            from: None,
            alone: false,
            wrong: BTreeSet::new(),
        }
    }

    /// Asks the members that could have the evidence, one after the other.
    ///
    /// # Errors
    /// Those of the folder.
    pub(crate) async fn turn(
        &mut self,
        node: &Node,
        state: &Community,
        case: &Case,
    ) -> io::Result<Came> {
        let hash = &case.dispute.evidence;
        let length = case.dispute.evidence_bytes;
        // The log bounds it, but a later version may allow more.
        if length > MAX_SEALED_BYTES as u64 {
            return Ok(Came::Nothing);
        }
        let judges = state.members().map(|(judge, _)| *judge);
        let judges = judges.filter(|judge| may_judge(state, judge, case));
        let holders = self.from.into_iter().chain([case.accuser]).chain(judges);
        let mut asked = BTreeSet::from([node.id()]);
        let holders: Vec<NodeId> = holders.filter(|holder| asked.insert(*holder)).collect();
        for holder in holders {
            if self.wrong.contains(&holder) {
                continue;
            }
            if self.alone && self.from != Some(holder) {
                self.folder.drop_part(hash)?;
            }
            self.from = Some(holder);
            let before = self.folder.part_length(hash);
            let sent = timeout(TIMEOUT, self.transfer(node, &holder, &case.dispute)).await;
            sent.unwrap_or(Ok(()))?;
            let after = self.folder.part_length(hash);
            if after >= length {
                let (folder, hash) = (self.folder.clone(), *hash);
                let finished = spawn_blocking(move || folder.finish(&hash)).await;
                if finished.map_err(io::Error::other)?? {
                    return Ok(Came::Whole);
                }
                if std::mem::replace(&mut self.alone, true) {
                    self.wrong.insert(holder);
                }
                self.from = None;
            } else if after.saturating_sub(before) >= LEAST_BYTES {
                return Ok(Came::More);
            }
            let holder = holder.short();
            tracing::debug!(%holder, "a member does not serve the evidence of a dispute");
        }
        Ok(Came::Nothing)
    }

    /// Fetches the pieces that are missing, as long as a member sends them.
    async fn transfer(&self, node: &Node, holder: &NodeId, dispute: &Dispute) -> io::Result<()> {
        let (hash, length) = (&dispute.evidence, dispute.evidence_bytes);
        let Ok(peer) = node.weights_of(holder).await else {
            return Ok(());
        };
        loop {
            let whole = self.folder.part_length(hash) / MAX_DATA_BYTES as u64;
            let at = whole.saturating_mul(MAX_DATA_BYTES as u64);
            let Some(left) = length.checked_sub(at).filter(|left| *left > 0) else {
                return Ok(());
            };
            let Ok(index) = u32::try_from(whole) else {
                return Ok(());
            };
            match peer.piece(hash, index).await {
                // A write of a piece is short, so it may block.
                Ok(Some(piece)) if piece.len() as u64 == left.min(MAX_DATA_BYTES as u64) => {
                    self.folder.put_piece(hash, at, &piece)?;
                    if piece.len() as u64 == left {
                        return Ok(());
                    }
                }
                _ => return Ok(()),
            }
        }
    }
}
