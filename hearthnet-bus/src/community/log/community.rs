//! View of the community that the rest of the program reads.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use hearthnet_text::sanitize_name;
use serde::{Deserialize, Serialize};
use serde_bytes::ByteArray;
use sha2::{Digest as _, Sha256};
use unicode_security::skeleton;

use super::adoption::Adoption;
use super::body::{Body, Level, Policy};
use super::dispute::{Case, Cases, Finding, Reputation, reputations};
use super::event::EventHash;
use super::gave::Gave;
use super::measured::Measured;
use crate::identity::cbor;
use crate::identity::raw_keys::{self, RawKey};
use crate::{CommunityId, Descriptor, NodeId};

/// Maximum number of invites between a member and the member that answers for it.
const MAX_INVITE_DEPTH: usize = 64;

/// Member of the community. Part of the state hash, so its fields stand in canonical order.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Member {
    /// Author of the member's invite, if the invite was for the level `member`; else `None`.
    /// [`Community::answers_for`] follows it. Stored here because invites are removed when others
    /// need their room.
    #[serde(with = "raw_keys::option")]
    pub by: Option<NodeId>,
    /// Contributions of the member, by its own count; `None` if it has announced nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gave: Option<Gave>,
    /// Display name, given when the node joined or later. Empty for a founder that has set none.
    pub name: String,
    pub level: Level,
    /// Time of joining in Unix milliseconds, by the clock of the node that admitted it.
    #[serde(rename = "since")]
    pub since_ms: u64,
    /// Invite that the member joined with; `None` for the founder.
    #[serde(with = "raw_keys::option")]
    pub invite: Option<NodeId>,
}

/// Invite, as the log stores it. Its fields stand in canonical order.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OpenInvite {
    /// Number of members that joined with it.
    pub used: u32,
    /// Maximum number of members that may join with it.
    pub uses: u32,
    /// Level of members that join with it.
    pub level: Level,
    /// First Unix millisecond in which it is no longer valid.
    #[serde(rename = "until")]
    pub expires_ms: u64,
    /// If the author loses the right to invite, its invites become invalid.
    #[serde(with = "raw_keys")]
    pub author: NodeId,
    pub withdrawn: bool,
}

impl OpenInvite {
    /// Returns whether nodes can still join with the invite at `now_ms`.
    pub(crate) fn is_open(&self, now_ms: u64) -> bool {
        !self.withdrawn && self.used < self.uses && self.expires_ms > now_ms
    }
}

/// A revoked key. Revocation is permanent.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Revocation {
    /// Last durable event of the key that has an effect.
    #[serde(rename = "seq")]
    pub last_seq: u64,
    /// Time of the revocation in Unix milliseconds, by the clock of the revoking node.
    #[serde(rename = "time")]
    pub time_ms: u64,
}

/// Proof that an author signed two different events with one sequence number.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Fork {
    /// Lowest sequence number at which the author's history forks.
    pub seq: u64,
    /// Hashes of the events that prove it, in rising order: two events at `seq`, or one at `seq`
    /// and the author's event before it, which it does not follow.
    pub proof: Vec<EventHash>,
}

/// Durable part of the view: the result of the fold over the durable events. The state hash is the
/// hash of its encoding, so its fields stand in canonical order.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Durable {
    /// Nodes that left, each with the invite by which it was a member. While that invite is open,
    /// revoking the node withdraws it.
    #[serde(
        default,
        skip_serializing_if = "BTreeMap::is_empty",
        with = "raw_keys::map"
    )]
    pub(super) left: BTreeMap<NodeId, RawKey>,
    pub(super) name: String,
    #[serde(with = "raw_keys::map")]
    pub(super) frozen: BTreeMap<NodeId, Fork>,
    /// Adopted models by weights id.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub(super) models: BTreeMap<ByteArray<32>, Adoption>,
    pub(super) policy: Policy,
    pub(super) created: bool,
    #[serde(with = "raw_keys::map")]
    pub(super) invites: BTreeMap<NodeId, OpenInvite>,
    #[serde(with = "raw_keys::map")]
    pub(super) members: BTreeMap<NodeId, Member>,
    #[serde(with = "raw_keys::map")]
    pub(super) revoked: BTreeMap<NodeId, Revocation>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub(super) disputes: Cases,
}

impl Durable {
    /// Current level of a node; `None` for strangers and for revoked or frozen nodes.
    pub(super) fn level(&self, node: &NodeId) -> Option<Level> {
        let member = self.members.get(node)?;
        (!self.frozen.contains_key(node)).then_some(member.level)
    }

    pub(super) fn outcome(&self, case: &Case) -> Option<Finding> {
        case.outcome(|judge| self.revoked.contains_key(judge))
    }

    pub(super) fn reputations(&self) -> BTreeMap<NodeId, Reputation> {
        reputations(&self.disputes, |judge| self.revoked.contains_key(judge))
    }

    /// Member that answers for a node; see [`Community::answers_for`].
    pub(super) fn group(
        &self,
        root: NodeId,
        node: &NodeId,
        is_anchor: impl Fn(&NodeId) -> bool,
    ) -> NodeId {
        let mut answers = *node;
        for _ in 0..MAX_INVITE_DEPTH {
            let by = self.members.get(&answers).and_then(|member| member.by);
            match by.filter(|by| *by != root && !is_anchor(by)) {
                Some(by) => answers = by,
                None => return answers,
            }
        }
        root
    }

    /// Members whose name looks like the name of another member.
    pub(super) fn lookalikes(&self) -> BTreeSet<NodeId> {
        let mut by_look: BTreeMap<String, Vec<NodeId>> = BTreeMap::new();
        for (node, member) in &self.members {
            by_look.entry(look(&member.name)).or_default().push(*node);
        }
        let several = by_look.into_values().filter(|nodes| nodes.len() > 1);
        several.flatten().collect()
    }
}

/// Comparison key for names that look alike: without case, accents, width, spaces and signs, and
/// with one letter for all that look like it in any script (UTS 39).
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

/// Meaning of a live event.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Entry {
    Shard(Advert),
    Node(Sighting),
    Measured(NodeId, Measured),
    Grant,
    /// The entry was withdrawn, or its kind has no view here.
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
            Body::NodeMeasured(measured) if measured == Measured::default() => Self::Nothing,
            Body::NodeMeasured(measured) => Self::Measured(author, measured),
            Body::GrantRevoked { .. } => Self::Grant,
            _ => Self::Nothing,
        }
    }
}

/// Shard that a trusted member advertises.
#[derive(Debug, Clone, PartialEq)]
pub struct Advert {
    /// Node id of the host.
    pub author: NodeId,
    pub descriptor: Descriptor,
    /// First Unix millisecond in which the advertisement is no longer valid.
    pub expires_ms: u64,
}

/// The latest announcement of a member about itself (`node.seen`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sighting {
    pub node: NodeId,
    /// Listening addresses, `ADDR:PORT`.
    pub endpoints: Vec<String>,
    /// Display name.
    pub name: String,
    /// Software name and version.
    pub software: String,
    /// First Unix millisecond in which the announcement is no longer valid.
    pub expires_ms: u64,
}

/// Immutable snapshot of the community as the log has it; cheap to clone.
///
/// Membership follows from the durable events alone, so nodes with the same durable events have the
/// same [`Community::state_hash`]. Shards and endpoints come from ephemeral events; methods that
/// return them take the current time and leave out expired ones.
#[derive(Debug, Clone, PartialEq)]
pub struct Community {
    pub id: CommunityId,
    /// Display name; empty until the event that creates the community has arrived.
    pub name: String,
    pub policy: Policy,
    durable: Arc<Durable>,
    /// Members whose name looks like the name of another member.
    lookalikes: Arc<BTreeSet<NodeId>>,
    /// Reputations that differ from the default.
    reputations: Arc<BTreeMap<NodeId, Reputation>>,
    pub(super) live: Arc<BTreeMap<(NodeId, String), Live>>,
}

impl Community {
    /// Community without events.
    pub(super) fn empty(id: CommunityId) -> Self {
        Self {
            id,
            name: String::new(),
            policy: Policy::default(),
            durable: Arc::default(),
            lookalikes: Arc::default(),
            reputations: Arc::default(),
            live: Arc::default(),
        }
    }

    /// Replaces the durable part.
    pub(super) fn update(&mut self, durable: &Durable) {
        if *self.durable != *durable {
            self.name = sanitize_name(&durable.name).into_owned();
            self.policy = durable.policy;
            self.lookalikes = Arc::new(durable.lookalikes());
            self.reputations = Arc::new(durable.reputations());
            self.durable = Arc::new(durable.clone());
        }
    }

    /// Returns whether the event that creates the community is here. Until then there are no
    /// members, and a joiner has to wait for its first sync.
    pub fn is_created(&self) -> bool {
        self.durable.created
    }

    /// Current level of a node; `None` for strangers and for revoked or frozen nodes.
    pub fn level(&self, node: &NodeId) -> Option<Level> {
        self.durable.level(node)
    }

    /// Looks up a member, including frozen ones.
    pub fn member(&self, node: &NodeId) -> Option<&Member> {
        self.durable.members.get(node)
    }

    /// All members by node id, including frozen ones.
    pub fn members(&self) -> impl Iterator<Item = (&NodeId, &Member)> {
        self.durable.members.iter()
    }

    /// Nodes that left and could rejoin by their invite, because it has uses left.
    pub fn left(&self) -> impl Iterator<Item = &NodeId> {
        self.durable.left.keys()
    }

    /// Returns whether a node was revoked. Revocation is permanent; its user may join again with a
    /// new key.
    pub fn is_revoked(&self, node: &NodeId) -> bool {
        self.durable.revoked.contains_key(node)
    }

    /// All revoked nodes.
    pub fn revoked(&self) -> impl Iterator<Item = (&NodeId, &Revocation)> {
        self.durable.revoked.iter()
    }

    /// Returns whether a node signed two histories and therefore lost all rights.
    pub fn is_frozen(&self, node: &NodeId) -> bool {
        self.durable.frozen.contains_key(node)
    }

    /// All frozen authors, with the proof.
    pub fn frozen(&self) -> impl Iterator<Item = (&NodeId, &Fork)> {
        self.durable.frozen.iter()
    }

    /// All invites by their keys, including used ones.
    pub fn invites(&self) -> impl Iterator<Item = (&NodeId, &OpenInvite)> {
        self.durable.invites.iter()
    }

    /// Looks up an invite by its key.
    pub fn invite(&self, invite: &NodeId) -> Option<&OpenInvite> {
        self.durable.invites.get(invite)
    }

    /// Adopted models, by name, then by weights id.
    pub fn models(&self) -> Vec<&Adoption> {
        let mut models: Vec<_> = self.durable.models.values().collect();
        // Stable, and the map is in the order of the weights ids.
        models.sort_by_key(|model| &model.name);
        models
    }

    /// Looks up an adopted model by its weights id.
    pub fn model(&self, weights: &[u8; 32]) -> Option<&Adoption> {
        self.durable.models.get(&ByteArray::new(*weights))
    }

    /// Counts the members that joined since `since_ms`, by the clocks of the nodes that admitted
    /// them: with any invite, and with this one. Invites that were removed to make room are still
    /// counted.
    pub fn joined_since(&self, since_ms: u64, invite: &NodeId) -> (usize, usize) {
        let joined = self.members().filter_map(|(_, member)| {
            let code = member.invite.filter(|_| member.since_ms >= since_ms)?;
            Some(code == *invite)
        });
        joined.fold((0, 0), |(all, with), same| {
            (all + 1, with + usize::from(same))
        })
    }

    /// Quota group of a member: the member that answers for it where members share something. A
    /// member gains no further share by inviting others.
    ///
    /// A member counts as itself if the root or a current anchor invited it, or if it joined above
    /// the level `member`. Otherwise it counts with its inviter, or with the member that answers
    /// for that one.
    ///
    /// Anchors answer for no other member: they could take a share from all others anyway, and an
    /// honest anchor may have invited the whole community.
    ///
    /// Members more than 64 invites away from such a member count together as the root, which uses
    /// no share itself. Honest chains are never that long.
    pub fn answers_for(&self, node: &NodeId) -> NodeId {
        let is_anchor = |by: &NodeId| self.level(by) == Some(Level::Anchor);
        self.durable.group(self.id.root(), node, is_anchor)
    }

    /// All disputes, by id.
    pub fn disputes(&self) -> impl Iterator<Item = (&[u8; 32], &Case)> {
        self.durable.disputes.iter().map(|(id, case)| (&**id, case))
    }

    /// Looks up a dispute by its id.
    pub fn dispute(&self, id: &[u8; 32]) -> Option<&Case> {
        self.durable.disputes.get(&ByteArray::new(*id))
    }

    /// Finding that the judges of a dispute agree on; `None` while it is open.
    pub fn outcome(&self, case: &Case) -> Option<Finding> {
        self.durable.outcome(case)
    }

    /// Reputation of a node by the verdicts about it (`specs/disputes.md` 8).
    pub fn reputation(&self, node: &NodeId) -> Reputation {
        self.reputations.get(node).copied().unwrap_or_default()
    }

    /// Returns whether a node may invite others at `level` now.
    pub fn may_invite(&self, node: &NodeId, level: Level) -> bool {
        !self.is_frozen(node) && self.durable.may_invite(self.id, node, level)
    }

    /// Unexpired shard advertisements of trusted members at `now_ms`.
    pub fn shards(&self, now_ms: u64) -> impl Iterator<Item = &Advert> {
        let adverts = self.entries(now_ms).filter_map(|entry| match entry {
            Entry::Shard(advert) => Some(advert),
            _ => None,
        });
        adverts.filter(move |advert| self.level(&advert.author) >= Some(Level::Trusted))
    }

    /// [`Community::shards`] that routes and plans may use: those of convicted nodes are left out.
    pub fn usable_shards(&self, now_ms: u64) -> impl Iterator<Item = &Advert> {
        let all = self.shards(now_ms);
        all.filter(|advert| !self.reputation(&advert.author).is_convicted())
    }

    /// Unexpired announcements of members about themselves at `now_ms`.
    pub fn nodes(&self, now_ms: u64) -> impl Iterator<Item = &Sighting> {
        let seen = self.entries(now_ms).filter_map(|entry| match entry {
            Entry::Node(seen) => Some(seen),
            _ => None,
        });
        seen.filter(move |seen| self.level(&seen.node).is_some())
    }

    /// Unexpired measurements of members at `now_ms`, by node id, without those that are withdrawn.
    pub fn measured(&self, now_ms: u64) -> impl Iterator<Item = (&NodeId, &Measured)> {
        let measured = self.entries(now_ms).filter_map(|entry| match entry {
            Entry::Measured(node, measured) => Some((node, measured)),
            _ => None,
        });
        measured.filter(move |(node, _)| self.level(node).is_some())
    }

    fn entries(&self, now_ms: u64) -> impl Iterator<Item = &Entry> {
        let live = self.live.values();
        let unexpired = live.filter(move |live| live.expires_ms > now_ms);
        unexpired.map(|live| &live.entry)
    }

    /// Returns whether the issuer or an anchor revoked a session token.
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

    /// SHA-256 of the canonical encoding of the durable state. Nodes with the same durable events
    /// have the same hash.
    pub fn state_hash(&self) -> [u8; 32] {
        let encoded = cbor::encode(self.durable.as_ref());
        debug_assert!(
            encoded.as_ref().is_ok_and(|bytes| cbor::is_in_order(bytes)),
            "the state cannot be encoded, or its fields are out of order"
        );
        // The hash of an empty string differs from that of every state, so a comparison fails.
        Sha256::digest(encoded.unwrap_or_default()).into()
    }
}

/// Names and addresses, for display and for dialling.
impl Community {
    /// Display name of a node: as admitted or, for the founder, as announced; may be empty.
    /// Invisible characters are removed, because the log accepts names that no node would give
    /// itself.
    pub fn name_of(&self, node: &NodeId, now_ms: u64) -> Cow<'_, str> {
        let admitted = self.member(node).map(|member| sanitize_name(&member.name));
        match admitted.filter(|name| !name.is_empty()) {
            Some(name) => name,
            None => self
                .seen(node, now_ms)
                .map_or(Cow::Borrowed(""), |seen| sanitize_name(&seen.name)),
        }
    }

    /// Display name for places without a node id beside it. Adds the short id if another member's
    /// name looks like it; a node without a name gets the short id alone.
    pub fn shown_name(&self, node: &NodeId, now_ms: u64) -> String {
        match self.name_of(node, now_ms) {
            name if name.is_empty() || self.lookalikes.contains(node) => self.label(node, now_ms),
            name => name.into_owned(),
        }
    }

    /// Listening addresses of a node; empty if it has no unexpired announcement.
    pub fn endpoints_of(&self, node: &NodeId, now_ms: u64) -> &[String] {
        self.seen(node, now_ms).map_or(&[], |seen| &seen.endpoints)
    }

    fn seen(&self, node: &NodeId, now_ms: u64) -> Option<&Sighting> {
        self.nodes(now_ms).find(|seen| seen.node == *node)
    }

    /// Name and short id of a node.
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
    use crate::testing::id as node;

    #[test]
    fn members_whose_names_look_alike_are_shown_with_their_ids() {
        let lookalikes = |names: &[&str]| -> Vec<bool> {
            let mut durable = Durable::default();
            for (name, seed) in names.iter().zip(1..) {
                let member = Member {
                    name: (*name).to_owned(),
                    level: Level::Member,
                    since_ms: 0,
                    invite: None,
                    by: None,
                    gave: None,
                };
                durable.members.insert(node(seed), member);
            }
            let lookalikes = durable.lookalikes();
            (1..)
                .zip(names)
                .map(|(seed, _)| lookalikes.contains(&node(seed)))
                .collect()
        };
        let invisible = "k\u{200b}im";
        for other in [
            "kim",
            "Kim",
            " kim",
            "k-i-m",
            "k\u{456}m",
            invisible,
            "\u{ff4b}im",
        ] {
            let found = lookalikes(&["kim", other, "attic"]);
            assert_eq!(found, [true, true, false], "{other:?}");
        }
        let different = lookalikes(&["kim", "tim", "kima", "K\u{fc}che"]);
        assert_eq!(different, [false; 4]);
        assert_eq!(lookalikes(&["!", "?", "", "\u{1f3e0}"]), [false; 4]);
    }
}
