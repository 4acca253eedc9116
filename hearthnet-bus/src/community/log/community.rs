//! What the log says now: the view that everything else in the program reads.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use hearthnet_text::tame_name;
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};
use unicode_security::skeleton;

use super::body::{Body, Level, Policy};
use super::event::EventHash;
use crate::identity::cbor;
use crate::identity::raw_keys;
use crate::{CommunityId, Descriptor, NodeId};

/// How many invites lie between a member and who answers for it, at most.
const MAX_ANSWERING: usize = 64;

/// A member of the community. Part of the state hash, so its fields stand in canonical order.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Member {
    /// The author of its invite, if any member may let somebody in at that level: it
    /// [answers](Community::answers_for) for whom it let in. Kept here because an invite is forgotten
    /// when others need its room.
    #[serde(with = "raw_keys::option")]
    pub by: Option<NodeId>,
    /// Display name: what the node called itself when it joined, or since. Empty for a founder
    /// that has not said.
    pub name: String,
    /// What it may do.
    pub level: Level,
    /// When it joined, in Unix milliseconds, by the clock of the node that admitted it.
    #[serde(rename = "since")]
    pub since_ms: u64,
    /// The invite it joined with; `None` for the founder.
    #[serde(with = "raw_keys::option")]
    pub invite: Option<NodeId>,
}

/// An invitation, as the log holds it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OpenInvite {
    /// How many joined with it.
    pub used: u32,
    /// How many may.
    pub uses: u32,
    /// What they become.
    pub level: Level,
    /// First Unix millisecond in which it no longer holds.
    #[serde(rename = "until")]
    pub expires_ms: u64,
    /// Who invited. If that node loses the right to invite, its invites lose their force.
    #[serde(with = "raw_keys")]
    pub author: NodeId,
    /// Taken back.
    pub withdrawn: bool,
}

/// A key that has no place in the community any more.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Revocation {
    /// Its last durable event that counts.
    #[serde(rename = "seq")]
    pub last_seq: u64,
    /// When, in Unix milliseconds by the clock of the node that revoked it.
    #[serde(rename = "time")]
    pub time_ms: u64,
}

/// Proof that one author signed two different events at one place.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Fork {
    /// The lowest sequence number at which the author's history parts.
    pub seq: u64,
    /// The events that prove it, in the order of their hashes: two bodies at `seq`; or one
    /// at `seq` that does not follow the author's event before it.
    pub proof: Vec<EventHash>,
}

/// The key of the invite that let somebody in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub(super) struct Code(#[serde(with = "raw_keys")] pub(super) NodeId);

/// The durable part of the view: what the fold over the durable events yields. Its encoding
/// is what the state hash is taken of, so its fields stand in canonical order.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Durable {
    /// Who left, by the invite that let it in: while that is open, it is withdrawn with whoever is
    /// put out.
    #[serde(
        default,
        skip_serializing_if = "BTreeMap::is_empty",
        with = "raw_keys::map"
    )]
    pub(super) left: BTreeMap<NodeId, Code>,
    pub(super) name: String,
    #[serde(with = "raw_keys::map")]
    pub(super) frozen: BTreeMap<NodeId, Fork>,
    pub(super) policy: Policy,
    pub(super) created: bool,
    #[serde(with = "raw_keys::map")]
    pub(super) invites: BTreeMap<NodeId, OpenInvite>,
    #[serde(with = "raw_keys::map")]
    pub(super) members: BTreeMap<NodeId, Member>,
    #[serde(with = "raw_keys::map")]
    pub(super) revoked: BTreeMap<NodeId, Revocation>,
}

impl Durable {
    /// Members whose name looks like that of another one, at a glance.
    pub(super) fn twins(&self) -> BTreeSet<NodeId> {
        let mut by_look: BTreeMap<String, Vec<NodeId>> = BTreeMap::new();
        for (node, member) in &self.members {
            by_look.entry(look(&member.name)).or_default().push(*node);
        }
        let several = by_look.into_values().filter(|nodes| nodes.len() > 1);
        several.flatten().collect()
    }
}

/// How a name looks at a glance: without case, accents of width, spaces and signs, and with
/// one letter for all that look like it in any script (UTS 39).
fn look(name: &str) -> String {
    let letters: String = skeleton(&name.to_lowercase())
        .filter(|c| c.is_alphanumeric())
        .collect();
    match letters.is_empty() {
        true => name.to_owned(),
        false => letters,
    }
}

/// The newest ephemeral event of one author's slot.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Live {
    pub(super) seq: u64,
    pub(super) hash: EventHash,
    pub(super) expires_ms: u64,
    pub(super) entry: Entry,
}

/// What a live event means to readers.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Entry {
    Shard(Advert),
    Node(Sighting),
    Grant,
    /// Withdrawn, or of a kind that has no view here.
    Nothing,
}

impl Entry {
    pub(super) fn of(author: NodeId, expires_ms: u64, body: Body) -> Self {
        match body {
            Body::ShardAdvertised(descriptor) => Self::Shard(Advert {
                author,
                descriptor: *descriptor,
                expires_ms,
            }),
            Body::NodeSeen {
                endpoints,
                name,
                software,
            } => Self::Node(Sighting {
                node: author,
                endpoints,
                name,
                software,
                expires_ms,
            }),
            Body::GrantRevoked { .. } => Self::Grant,
            _ => Self::Nothing,
        }
    }
}

/// A shard that a trusted member says it serves.
#[derive(Debug, Clone, PartialEq)]
pub struct Advert {
    /// Who says so: the host itself.
    pub author: NodeId,
    /// What it serves, and where.
    pub descriptor: Descriptor,
    /// First Unix millisecond in which this no longer holds.
    pub expires_ms: u64,
}

/// What a member said of itself when it was last heard of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sighting {
    /// Node id of the member.
    pub node: NodeId,
    /// Where it listens, `ADDR:PORT`.
    pub endpoints: Vec<String>,
    /// Its display name.
    pub name: String,
    /// Software name and version.
    pub software: String,
    /// First Unix millisecond in which this no longer holds.
    pub expires_ms: u64,
}

/// The community as the log knows it: an unchanging picture, cheap to clone.
///
/// Which members there are follows from the durable events alone, so two nodes that have the
/// same ones have the same [`Community::state_hash`]. Shards and endpoints come from ephemeral
/// events; whether one still holds is asked with the time of asking.
#[derive(Debug, Clone, PartialEq)]
pub struct Community {
    /// Id of the community.
    pub id: CommunityId,
    /// What people call it; empty until the event that creates it has arrived.
    pub name: String,
    /// What it has agreed on.
    pub policy: Policy,
    durable: Arc<Durable>,
    /// Members whose names look like another's.
    twins: Arc<BTreeSet<NodeId>>,
    live: Arc<BTreeMap<(NodeId, String), Live>>,
}

impl Community {
    pub(super) fn new(
        id: CommunityId,
        durable: Arc<Durable>,
        twins: Arc<BTreeSet<NodeId>>,
        live: Arc<BTreeMap<(NodeId, String), Live>>,
    ) -> Self {
        Self {
            id,
            name: tame_name(&durable.name).into_owned(),
            policy: durable.policy,
            durable,
            twins,
            live,
        }
    }

    /// Whether the event that creates the community is here. Until then there are no members:
    /// a joiner has to wait for its first sync.
    pub fn is_created(&self) -> bool {
        self.durable.created
    }

    /// What a node may do now; `None` for strangers, for revoked and for frozen ones.
    pub fn level(&self, node: &NodeId) -> Option<Level> {
        if self.is_frozen(node) {
            return None;
        }
        self.durable.members.get(node).map(|member| member.level)
    }

    /// A member, frozen ones included.
    pub fn member(&self, node: &NodeId) -> Option<&Member> {
        self.durable.members.get(node)
    }

    /// All members by node id, frozen ones included.
    pub fn members(&self) -> impl Iterator<Item = (&NodeId, &Member)> {
        self.durable.members.iter()
    }

    /// Who left, and could come back by the code that let it in: it has uses left.
    pub fn left(&self) -> impl Iterator<Item = &NodeId> {
        self.durable.left.keys()
    }

    /// Whether a node was revoked. That is for ever: whoever it was may join again with a new
    /// key.
    pub fn is_revoked(&self, node: &NodeId) -> bool {
        self.durable.revoked.contains_key(node)
    }

    /// All revoked nodes.
    pub fn revoked(&self) -> impl Iterator<Item = (&NodeId, &Revocation)> {
        self.durable.revoked.iter()
    }

    /// Whether a node signed two histories, and so lost its say.
    pub fn is_frozen(&self, node: &NodeId) -> bool {
        self.durable.frozen.contains_key(node)
    }

    /// All frozen authors, with the proof.
    pub fn frozen(&self) -> impl Iterator<Item = (&NodeId, &Fork)> {
        self.durable.frozen.iter()
    }

    /// All invites, used ones included, by their keys.
    pub fn invites(&self) -> impl Iterator<Item = (&NodeId, &OpenInvite)> {
        self.durable.invites.iter()
    }

    /// An invite by its key.
    pub fn invite(&self, invite: &NodeId) -> Option<&OpenInvite> {
        self.durable.invites.get(invite)
    }

    /// How many members joined since, by the clocks of those who admitted them, with any invite; and
    /// of these with this one. An invite that was used up and has made room for others counts no more.
    pub fn joined_since(&self, since_ms: u64, invite: &NodeId) -> (usize, usize) {
        let joined = self.members().filter_map(|(_, member)| {
            let code = member.invite.filter(|_| member.since_ms >= since_ms)?;
            Some(code == *invite)
        });
        joined.fold((0, 0), |(all, with), same| {
            (all + 1, with + usize::from(same))
        })
    }

    /// Who answers for a member where members have shares, so that nobody has more of them for inviting:
    /// the member itself, if the root or somebody who is an anchor now has let it in, or its level says that
    /// somebody who was one has; else the member that did, or who answers for that one.
    ///
    /// Anchors are left out because all that their invitees could take they can take away from everybody as
    /// they please, and because an honest one has invited the whole village.
    ///
    /// All who are more than so many invites away from one are counted together, with the root's key, which
    /// takes nothing itself: nobody has a longer chain but to be told apart.
    pub fn answers_for(&self, node: &NodeId) -> NodeId {
        let mut answers = *node;
        for _ in 0..MAX_ANSWERING {
            let by = self.member(&answers).and_then(|member| member.by);
            let is_anchor = |by: &NodeId| self.level(by) == Some(Level::Anchor);
            match by.filter(|by| *by != self.id.root() && !is_anchor(by)) {
                Some(by) => answers = by,
                None => return answers,
            }
        }
        self.id.root()
    }

    /// Whether a node may invite others at `level` now.
    pub fn may_invite(&self, node: &NodeId, level: Level) -> bool {
        !self.is_frozen(node) && self.durable.may_invite(self.id, node, level)
    }

    /// The shards that trusted members advertise at `now_ms`.
    pub fn shards(&self, now_ms: u64) -> impl Iterator<Item = &Advert> {
        self.live
            .values()
            .filter_map(move |live| match &live.entry {
                Entry::Shard(advert)
                    if live.expires_ms > now_ms
                        && self.level(&advert.author) >= Some(Level::Trusted) =>
                {
                    Some(advert)
                }
                _ => None,
            })
    }

    /// What members said of themselves and still holds at `now_ms`.
    pub fn nodes(&self, now_ms: u64) -> impl Iterator<Item = &Sighting> {
        self.live
            .values()
            .filter_map(move |live| match &live.entry {
                Entry::Node(seen)
                    if live.expires_ms > now_ms && self.level(&seen.node).is_some() =>
                {
                    Some(seen)
                }
                _ => None,
            })
    }

    /// Whether a session token was revoked, by its issuer or by an anchor.
    pub(crate) fn is_grant_revoked(&self, issuer: &NodeId, id: &[u8; 16], now_ms: u64) -> bool {
        let body = Body::GrantRevoked {
            issuer: *issuer,
            id: *id,
        };
        let Some(slot) = body.slot() else {
            return false;
        };
        let anchors = self
            .members()
            .filter(|(node, _)| self.level(node) == Some(Level::Anchor))
            .map(|(node, _)| *node);
        anchors.chain([*issuer]).any(|author| {
            self.live
                .get(&(author, slot.clone()))
                .is_some_and(|live| live.entry == Entry::Grant && live.expires_ms > now_ms)
        })
    }

    /// Every slot that is held.
    #[cfg(test)]
    pub(super) fn live_slots(&self) -> Vec<(NodeId, String)> {
        self.live.keys().cloned().collect()
    }

    /// SHA-256 of the canonical encoding of everything that follows from the durable events.
    /// Nodes with the same durable events have the same one.
    pub fn state_hash(&self) -> [u8; 32] {
        let encoded = cbor::encode(self.durable.as_ref());
        debug_assert!(
            encoded.as_ref().is_ok_and(|bytes| cbor::is_in_order(bytes)),
            "the state cannot be encoded, or its fields are out of order"
        );
        // The hash of nothing differs from all others, which is what a comparison should say then.
        Sha256::digest(encoded.unwrap_or_default()).into()
    }
}

/// Names and addresses, for people and for those who look for a node.
impl Community {
    /// What people call a node: as it joined, or, for the founder, as it is heard; may be empty.
    /// Without what cannot be seen: a log takes names that no node gives itself.
    pub fn name_of(&self, node: &NodeId, now_ms: u64) -> Cow<'_, str> {
        let admitted = self.member(node).map(|member| tame_name(&member.name));
        match admitted.filter(|name| !name.is_empty()) {
            Some(name) => name,
            None => self
                .seen(node, now_ms)
                .map_or(Cow::Borrowed(""), |seen| tame_name(&seen.name)),
        }
    }

    /// The same where no id stands beside it: with the short id if another member's name looks like
    /// it, and that alone if it has no name.
    pub fn shown_name(&self, node: &NodeId, now_ms: u64) -> String {
        match self.name_of(node, now_ms) {
            name if name.is_empty() || self.twins.contains(node) => self.label(node, now_ms),
            name => name.into_owned(),
        }
    }

    /// Where a node listens, if it was heard of lately.
    pub fn endpoints_of(&self, node: &NodeId, now_ms: u64) -> &[String] {
        self.seen(node, now_ms).map_or(&[], |seen| &seen.endpoints)
    }

    fn seen(&self, node: &NodeId, now_ms: u64) -> Option<&Sighting> {
        self.nodes(now_ms).find(|seen| seen.node == *node)
    }

    /// How a node is shown: its name and its short id.
    pub fn label(&self, node: &NodeId, now_ms: u64) -> String {
        match self.name_of(node, now_ms) {
            name if name.is_empty() => node.short(),
            name => format!("{name} ({})", node.short()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::NodeKey;

    #[test]
    fn members_whose_names_look_alike_are_shown_with_their_ids() {
        let node = |seed: u8| NodeKey::from_secret(&[seed; 32]).id();
        let twins = |names: &[&str]| -> Vec<bool> {
            let mut durable = Durable::default();
            for (name, seed) in names.iter().zip(1..) {
                let member = Member {
                    name: (*name).to_owned(),
                    level: Level::Member,
                    since_ms: 0,
                    invite: None,
                    by: None,
                };
                durable.members.insert(node(seed), member);
            }
            let twins = durable.twins();
            (1..)
                .zip(names)
                .map(|(seed, _)| twins.contains(&node(seed)))
                .collect()
        };
        for other in [
            "kim",
            "Kim",
            " kim",
            "k-i-m",
            "k\u{456}m",
            "k\u{200b}im",
            "\u{ff4b}im",
        ] {
            assert_eq!(
                twins(&["kim", other, "attic"]),
                [true, true, false],
                "{other:?}"
            );
        }
        assert_eq!(twins(&["kim", "tim", "kima", "K\u{fc}che"]), [false; 4]);
        assert_eq!(twins(&["!", "?", "", "\u{1f3e0}"]), [false; 4]);
    }
}
