//! Computes the durable state from the durable events: the effect of each kind, and the rights that
//! it takes.
//!
//! Events are applied in the order of their [`Position`]s. Each is judged in the state just before
//! it. An event that its author may not make has no effect.
//!
//! # Demotions and revocations are retroactive
//!
//! A revocation or a change of level names the last event of the node that its author had seen.
//! Later events of the node have no more effect than its remaining level allows, *even if they sort
//! before*. Otherwise a revoked or demoted node could keep its former rights by making events with
//! small Lamport times. The effect of an event can therefore depend on events after it, and the
//! state is defined in three steps (`specs/event-log.md`, section 5):
//!
//! 1. The root's revocations and changes of level always hold. They give the first cuts: for a
//!    revoked node `node -> last event`, for another node `node -> (level, last event)`.
//! 2. All events are applied under these cuts. This decides which revocations and changes of level
//!    by anchors hold. Being an anchor depends on the root and on anchors only, never on nodes that
//!    anchors may revoke or demote.
//! 3. If step 2 cuts off an event that had an effect, all events are applied once more, under all
//!    cuts and with the revocations of step 2.
//!
//! Normally no effect is cut off, because the revocation or demotion names the node's last event.
//! Then one pass gives the same result, and events that sort last are applied as they come.
//! [`Fold::apply`] returns [`Applied::Retroactive`] if that shortcut is not possible.

use std::collections::{BTreeMap, BTreeSet};

use hearthnet_transport::Code as ErrorCode;
use serde::{Deserialize, Serialize};

use super::body::{Body, Level};
use super::community::{Code, Durable, Fork, Member, OpenInvite, Revocation};
use super::event::{Event, Position};
use crate::identity::raw_keys;
use crate::{CommunityId, NodeId};

/// Maximum number of members and revoked nodes together. Heads and views list them all.
pub const MAX_MEMBERS: usize = 4096;

/// Maximum number of invites in the state. Closed ones are removed to make room for new ones.
pub const MAX_INVITES: usize = 1024;

/// Reason why an event has no effect.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NoEffect {
    /// The author is not, or no longer, a member.
    #[error("{0} is not a member of this community")]
    NotMember(NodeId),
    /// The author was revoked, and the event is later than the last one that counts.
    #[error("{0} was revoked")]
    Revoked(NodeId),
    #[error("this takes {needed} rights")]
    Level {
        /// The required level, in the possessive ("an anchor's").
        needed: &'static str,
    },
    /// The subject of the event is not a member.
    #[error("{0} is not a member of this community")]
    NoSuchMember(NodeId),
    /// The admitted node is a member already.
    #[error("{0} is a member already")]
    AlreadyMember(NodeId),
    #[error("{0} has this level already")]
    SameLevel(NodeId),
    #[error("{0} has this name already")]
    SameName(NodeId),
    /// The last anchor cannot leave while there are other members.
    #[error(
        "{0} is the last anchor and cannot leave while there are other members; promote another first"
    )]
    LastAnchor(NodeId),
    /// The root key cannot be admitted, promoted or revoked, because it is not a member.
    #[error("the community's root key cannot be a member")]
    Root,
    #[error("there is no such invite")]
    NoSuchInvite,
    #[error("an invite with this key exists already")]
    InviteExists,
    /// The invite was withdrawn, or its author has lost the right to invite.
    #[error("the invite was withdrawn")]
    InviteWithdrawn,
    #[error("the invite has expired")]
    InviteExpired,
    /// The invite has no uses left.
    #[error("the invite was used already")]
    InviteUsed,
    /// The level of the admission differs from that of the invite.
    #[error("the invite is for another level")]
    InviteLevel,
    /// There are [`MAX_MEMBERS`] members or [`MAX_INVITES`] open invites.
    #[error("the community is full")]
    Full,
    /// The kind has no effect on the durable state.
    #[error("this kind of event does not change the community")]
    Nothing,
}

impl NoEffect {
    /// Stable code of the refusal.
    pub fn code(&self) -> ErrorCode {
        ErrorCode::new(match self {
            Self::NotMember(_) | Self::Level { .. } => "unauthorized",
            Self::Revoked(_) => "revoked",
            Self::NoSuchInvite
            | Self::InviteExists
            | Self::InviteWithdrawn
            | Self::InviteExpired
            | Self::InviteUsed
            | Self::InviteLevel => "bad_invite",
            _ => "bad_request",
        })
    }
}

/// Result of applying an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Applied {
    /// The event changed the state.
    Effect,
    /// The event changed nothing.
    None(NoEffect),
    /// The event takes a level from a node, and with it the right to events that already had an
    /// effect: the state must be computed again from all events. [`Fold::apply`] does not apply
    /// this event.
    Retroactive,
}

/// Role of an event's author, in rising order of power.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Actor {
    Stranger,
    Member(Level),
    Root,
}

const ANCHOR: Actor = Actor::Member(Level::Anchor);

impl Actor {
    /// Error for an author that lacks this role.
    fn needed(self) -> NoEffect {
        NoEffect::Level {
            needed: match self {
                Self::Stranger | Self::Member(Level::Member) => "a member's",
                Self::Member(Level::Trusted) => "a trusted member's",
                ANCHOR => "an anchor's",
                Self::Root => "the root key's",
            },
        }
    }
}

impl Durable {
    fn actor(&self, community: CommunityId, node: &NodeId) -> Actor {
        if *node == community.root() {
            return Actor::Root;
        }
        self.members
            .get(node)
            .map_or(Actor::Stranger, |member| Actor::Member(member.level))
    }

    /// Minimum role for inviting others at `level`.
    fn inviter(&self, level: Level) -> Actor {
        match level {
            Level::Member => Actor::Member(self.policy.who_may_invite),
            Level::Trusted => ANCHOR,
            Level::Anchor => Actor::Root,
        }
    }

    pub(super) fn may_invite(&self, community: CommunityId, node: &NodeId, level: Level) -> bool {
        self.actor(community, node) >= self.inviter(level)
    }

    pub(super) fn knows(&self, community: CommunityId, author: &NodeId) -> bool {
        *author == community.root()
            || self.members.contains_key(author)
            || self.revoked.contains_key(author)
    }
}

/// State while events are applied, with all that is needed to continue. Snapshots store this.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Fold {
    #[serde(with = "raw_keys")]
    root: NodeId,
    pub(super) state: Durable,
    /// Last event of each of these authors that counts (revocations).
    #[serde(with = "raw_keys::map")]
    cuts: BTreeMap<NodeId, u64>,
    /// Changes of level, by node. An event that sorts before such a change, but has a greater
    /// number than the change names, is judged by the lower of the two levels.
    #[serde(default, with = "raw_keys::map")]
    levels: BTreeMap<NodeId, BTreeSet<LevelCut>>,
    /// Number of the last event of each author that had an effect.
    #[serde(with = "raw_keys::map")]
    effective: BTreeMap<NodeId, u64>,
    /// Authors whose events had an effect in step 2 or 3. Their events are kept even if the result
    /// does not list the authors as members.
    acted: BTreeSet<[u8; 32]>,
    /// Positions of the revocations that hold, in step 3 and in a replay.
    decided: Option<BTreeSet<(u64, [u8; 32], u64)>>,
    /// Positions of the revocations by anchors that were found to hold.
    found: BTreeSet<(u64, [u8; 32], u64)>,
    /// Position of the last applied event.
    at: Option<(u64, [u8; 32], u64)>,
    /// Number of applied events.
    pub(super) count: u64,
}

/// Change of a member's level, as a limit on events that sort before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
struct LevelCut {
    /// Position of the change.
    place: (u64, [u8; 32], u64),
    /// Last event of the member that the author of the change had seen.
    last_seq: u64,
    level: Level,
}

fn key(at: Position) -> (u64, [u8; 32], u64) {
    (at.lamport, *at.author.as_bytes(), at.seq)
}

impl Fold {
    pub(super) fn new(community: CommunityId) -> Self {
        Self {
            root: community.root(),
            state: Durable::default(),
            cuts: BTreeMap::new(),
            levels: BTreeMap::new(),
            effective: BTreeMap::new(),
            acted: BTreeSet::new(),
            decided: None,
            found: BTreeSet::new(),
            at: None,
            count: 0,
        }
    }

    pub(super) fn is_of(&self, community: CommunityId) -> bool {
        self.root == community.root()
    }

    /// Returns whether the log stores this author's events without the limits for strangers. That
    /// holds for the root, for current and former members, and for authors of events that had an
    /// effect.
    pub(super) fn knows(&self, author: &NodeId) -> bool {
        self.state.knows(self.community(), author) || self.acted.contains(author.as_bytes())
    }

    /// Position of the last applied event.
    pub(super) fn at(&self) -> Option<Position> {
        self.at.map(|(lamport, author, seq)| Position {
            lamport,
            author: NodeId::from_checked(author),
            seq,
        })
    }

    /// Returns whether an event at this position sorts after all applied ones.
    pub(super) fn is_before(&self, position: Position) -> bool {
        self.at.is_none_or(|at| at < key(position))
    }

    /// Returns whether events that sort last can be applied and snapshots used. After a retroactive
    /// revocation they cannot, because the states before it have changed.
    pub(super) fn is_plain(&self) -> bool {
        self.decided.is_none()
    }

    /// Returns whether an event of this author with at least this number had an effect.
    pub(super) fn had_effect(&self, author: &NodeId, from_seq: u64) -> bool {
        self.effective
            .get(author)
            .is_some_and(|seq| *seq >= from_seq)
    }

    /// Computes the state from all events. Each call of `scan` passes all of them in their order.
    pub(super) fn of_all<E>(
        community: CommunityId,
        mut scan: impl FnMut(&mut dyn FnMut(&Event)) -> Result<(), E>,
    ) -> Result<Self, E> {
        let root = community.root();
        let mut first = Self::new(community);
        scan(&mut |event| {
            if event.author != root {
                return;
            }
            match event.body {
                Body::Revoked { node, last_seq } if node != root => first.cut(node, last_seq),
                Body::LevelChanged {
                    node,
                    level,
                    last_seq: Some(last_seq),
                } => first.cut_level(event, node, level, last_seq),
                _ => {}
            }
        })?;
        let mut second = first.clone();
        let mut retroactive = false;
        scan(&mut |event| {
            // An event that is cut off keeps its effect here: this pass only decides which
            // revocations hold.
            retroactive |= second.step(event, true) == Applied::Retroactive;
        })?;
        if !retroactive {
            return Ok(second);
        }
        let mut third = first;
        third.cuts = std::mem::take(&mut second.cuts);
        third.levels = std::mem::take(&mut second.levels);
        third.decided = Some(std::mem::take(&mut second.found));
        third.acted = std::mem::take(&mut second.acted);
        scan(&mut |event| {
            third.step(event, true);
        })?;
        Ok(third)
    }

    /// Creates a fold without applied events. Applying all events to it leads to the state of this
    /// one, with the same result for each event.
    pub(super) fn replay(&self) -> Self {
        let mut replay = Self::new(self.community());
        replay.cuts.clone_from(&self.cuts);
        replay.levels.clone_from(&self.levels);
        replay.decided = Some(self.decided.as_ref().unwrap_or(&self.found).clone());
        replay
    }

    /// Applies the next event of a replay and returns whether it had an effect.
    pub(super) fn again(&mut self, event: &Event) -> Result<(), NoEffect> {
        match self.step(event, true) {
            Applied::None(why) => Err(why),
            Applied::Effect | Applied::Retroactive => Ok(()),
        }
    }

    /// Applies an event that sorts after all others. With [`Applied::Retroactive`], the state is
    /// unchanged.
    pub(super) fn apply(&mut self, event: &Event) -> Applied {
        let takes = matches!(event.body, Body::Revoked { .. } | Body::LevelChanged { .. });
        if !self.is_plain() && takes {
            return Applied::Retroactive;
        }
        self.step(event, false)
    }

    /// Returns whether an event that sorts after all others would have an effect.
    pub(super) fn check(&self, event: &Event) -> Result<(), NoEffect> {
        let mut after = self.clone();
        after.decided = None;
        match after.step(event, true) {
            Applied::None(why) => Err(why),
            Applied::Effect | Applied::Retroactive => Ok(()),
        }
    }

    fn cut(&mut self, node: NodeId, last_seq: u64) {
        let cut = self.cuts.entry(node).or_insert(last_seq);
        *cut = last_seq.min(*cut);
    }

    /// Records that `event` sets a level. If all cuts are known already, this changes nothing.
    fn cut_level(&mut self, event: &Event, node: NodeId, level: Level, last_seq: u64) {
        let cut = LevelCut {
            place: key(event.position()),
            last_seq,
            level,
        };
        self.levels.entry(node).or_default().insert(cut);
    }

    /// Returns whether an event, the next one of a [replay](Self::replay), counts for less than its
    /// author's level at its position: the author of a later revocation or demotion had not seen
    /// it.
    pub(super) fn is_void(&self, event: &Event) -> bool {
        let cut = self.cuts.get(&event.author);
        cut.is_some_and(|last| event.seq > *last)
            || self.actor(event) < self.state.actor(self.community(), &event.author)
    }

    /// Role in which the author of an event acts: its level at that position, limited by later
    /// changes of level whose authors had not seen the event.
    fn actor(&self, event: &Event) -> Actor {
        let actor = self.state.actor(self.community(), &event.author);
        let place = key(event.position());
        let cuts = self.levels.get(&event.author).into_iter().flatten();
        let later = cuts.filter(|cut| event.seq > cut.last_seq && place < cut.place);
        match later.map(|cut| Actor::Member(cut.level)).min() {
            Some(left) if actor != Actor::Root => actor.min(left),
            _ => actor,
        }
    }

    fn step(&mut self, event: &Event, go_on: bool) -> Applied {
        let applied = self.judge(event, go_on);
        if applied == Applied::Retroactive && !go_on {
            return applied;
        }
        if !matches!(applied, Applied::None(_)) {
            self.effective.insert(event.author, event.seq);
            self.acted.insert(*event.author.as_bytes());
        }
        self.at = Some(key(event.position()));
        self.count = self.count.saturating_add(1);
        applied
    }

    fn judge(&mut self, event: &Event, go_on: bool) -> Applied {
        if self
            .cuts
            .get(&event.author)
            .is_some_and(|last| event.seq > *last)
        {
            return Applied::None(NoEffect::Revoked(event.author));
        }
        let (node, last_seq, level) = match event.body {
            Body::Revoked { node, last_seq } => (node, Some(last_seq), None),
            Body::LevelChanged {
                node,
                level,
                last_seq,
            } => (node, last_seq, Some(level)),
            _ => {
                return match self.change(event) {
                    Ok(()) => Applied::Effect,
                    Err(why) => Applied::None(why),
                };
            }
        };
        let actor = self.actor(event);
        let holds = match level {
            None => self.may_revoke(event, actor, &node),
            Some(level) => self.may_set_level(event, actor, &node, level),
        };
        // A change of level by the root is in the first cuts, so it binds earlier events even if it
        // has no effect at its own position.
        let by_root = level.is_some() && actor == Actor::Root;
        let binds = last_seq.filter(|_| holds.is_ok() || by_root);
        let retroactive = self.decided.is_none()
            && binds.is_some_and(|last| self.had_effect(&node, last.saturating_add(1)));
        if retroactive && !go_on {
            return Applied::Retroactive;
        }
        match (binds, level) {
            (Some(last), None) => self.cut(node, last),
            (Some(last), Some(level)) => self.cut_level(event, node, level, last),
            (None, _) => {}
        }
        match (holds, level) {
            (Err(why), _) => return Applied::None(why),
            (Ok(()), None) => self.apply_revocation(event, actor, node, last_seq.unwrap_or(0)),
            (Ok(()), Some(level)) => {
                if let Some(member) = self.state.members.get_mut(&node) {
                    member.level = level;
                }
            }
        }
        match retroactive {
            true => Applied::Retroactive,
            false => Applied::Effect,
        }
    }

    fn community(&self) -> CommunityId {
        CommunityId::from(self.root)
    }

    fn may_revoke(&self, event: &Event, actor: Actor, node: &NodeId) -> Result<(), NoEffect> {
        match (&self.decided, actor) {
            _ if *node == self.root => return Err(NoEffect::Root),
            (_, Actor::Root) => {}
            (Some(decided), _) if decided.contains(&key(event.position())) => {}
            (None, ANCHOR) if self.state.actor(self.community(), node) == ANCHOR => {
                return Err(Actor::Root.needed());
            }
            (None, ANCHOR) => {}
            (None, Actor::Stranger) => return Err(NoEffect::NotMember(event.author)),
            _ => return Err(ANCHOR.needed()),
        }
        match self.state.knows(self.community(), node) || self.has_room() {
            true => Ok(()),
            false => Err(NoEffect::Full),
        }
    }

    fn may_set_level(
        &self,
        event: &Event,
        actor: Actor,
        node: &NodeId,
        level: Level,
    ) -> Result<(), NoEffect> {
        match self.state.members.get(node).map(|member| member.level) {
            _ if actor == Actor::Stranger => Err(NoEffect::NotMember(event.author)),
            _ if actor < ANCHOR => Err(ANCHOR.needed()),
            None => Err(NoEffect::NoSuchMember(*node)),
            Some(now) if actor != Actor::Root && now.max(level) == Level::Anchor => {
                Err(Actor::Root.needed())
            }
            Some(now) if now == level => Err(NoEffect::SameLevel(*node)),
            Some(_) => Ok(()),
        }
    }

    fn apply_revocation(&mut self, event: &Event, actor: Actor, node: NodeId, last_seq: u64) {
        if actor != Actor::Root {
            self.found.insert(key(event.position()));
        }
        // The revoked node has the code of its invite and could come back with another key. The
        // same holds for a node that left before its revocation.
        let member = self.state.members.remove(&node);
        let invite = member.and_then(|member| member.invite);
        let invite = invite.or_else(|| self.state.left.remove(&node).map(|code| code.0));
        if let Some(open) = invite.and_then(|invite| self.state.invites.get_mut(&invite)) {
            open.withdrawn = true;
        }
        let new = Revocation {
            last_seq,
            time_ms: event.time_ms,
        };
        self.state
            .revoked
            .entry(node)
            .and_modify(|old| old.last_seq = old.last_seq.min(last_seq))
            .or_insert(new);
    }

    /// Removes members that joined with `invite` but are not in the withdrawal's list `named`. A
    /// backdated event may have admitted them. An anchor cannot remove anchors; the root can.
    fn remove_unnamed(&mut self, invite: &NodeId, named: &BTreeSet<NodeId>, actor: Actor) {
        let came = self.state.members.extract_if(.., |node, member| {
            let anchor = member.level == Level::Anchor && actor != Actor::Root;
            member.invite == Some(*invite) && !named.contains(node) && !anchor
        });
        // Events that they signed stay in the log.
        self.acted.extend(came.map(|(node, _)| *node.as_bytes()));
    }

    fn has_room(&self) -> bool {
        self.state.members.len() + self.state.revoked.len() < MAX_MEMBERS
    }

    /// Applies every kind except revocations and changes of level.
    fn change(&mut self, event: &Event) -> Result<(), NoEffect> {
        let community = self.community();
        let actor = self.actor(event);
        let at_least = |needed: Actor| match actor {
            _ if actor >= needed => Ok(()),
            Actor::Stranger => Err(NoEffect::NotMember(event.author)),
            _ => Err(needed.needed()),
        };
        match &event.body {
            Body::CommunityCreated {
                name,
                policy,
                founder,
            } => {
                // The form check ensures that this is a first event of the root. If the root's
                // history forks, the event that sorts first counts.
                if self.state.created {
                    return Err(NoEffect::Nothing);
                }
                self.state.created = true;
                self.state.name.clone_from(name);
                self.state.policy = *policy;
                if *founder != self.root {
                    self.state.members.insert(
                        *founder,
                        Member {
                            name: String::new(),
                            level: Level::Anchor,
                            since_ms: event.time_ms,
                            invite: None,
                            by: None,
                        },
                    );
                }
                Ok(())
            }
            Body::PolicyChanged(policy) => {
                at_least(ANCHOR)?;
                self.state.policy = *policy;
                Ok(())
            }
            Body::Invited {
                invite,
                level,
                uses,
                expires_ms,
            } => {
                at_least(self.state.inviter(*level))?;
                if self.state.invites.contains_key(invite) {
                    return Err(NoEffect::InviteExists);
                }
                if self.state.invites.len() >= MAX_INVITES {
                    let now = event.time_ms;
                    self.state
                        .invites
                        .retain(|_, i| !i.withdrawn && i.used < i.uses && i.expires_ms > now);
                }
                if self.state.invites.len() >= MAX_INVITES {
                    return Err(NoEffect::Full);
                }
                self.state.invites.insert(
                    *invite,
                    OpenInvite {
                        used: 0,
                        uses: *uses,
                        level: *level,
                        expires_ms: *expires_ms,
                        author: event.author,
                        withdrawn: false,
                    },
                );
                Ok(())
            }
            Body::InviteWithdrawn { invite, members } => {
                let open = self
                    .state
                    .invites
                    .get_mut(invite)
                    .ok_or(NoEffect::NoSuchInvite)?;
                if event.author != open.author {
                    at_least(ANCHOR)?;
                }
                if open.withdrawn {
                    return Err(NoEffect::InviteWithdrawn);
                }
                open.withdrawn = true;
                if let (Some(members), true) = (members, actor >= ANCHOR) {
                    self.remove_unnamed(invite, members, actor);
                }
                Ok(())
            }
            Body::Admitted { request, level } => {
                let node = request.node;
                let open = self
                    .state
                    .invites
                    .get(&request.invite)
                    .ok_or(NoEffect::NoSuchInvite)?;
                // The admitting node vouches that the invite had not expired by its clock. Its
                // level must be at least that of the invite.
                at_least(Actor::Member(open.level.max(Level::Trusted)))?;
                // Revoking the node withdrew its own invite. This check comes first, so that the
                // joiner gets the true reason.
                if self.state.revoked.contains_key(&node) {
                    return Err(NoEffect::Revoked(node));
                }
                if open.withdrawn || !self.state.may_invite(community, &open.author, open.level) {
                    return Err(NoEffect::InviteWithdrawn);
                }
                if open.level != *level {
                    return Err(NoEffect::InviteLevel);
                }
                if event.time_ms >= open.expires_ms {
                    return Err(NoEffect::InviteExpired);
                }
                if open.used >= open.uses {
                    return Err(NoEffect::InviteUsed);
                }
                let by = open.author;
                if node == self.root {
                    return Err(NoEffect::Root);
                }
                if self.state.members.contains_key(&node) {
                    return Err(NoEffect::AlreadyMember(node));
                }
                if !self.has_room() {
                    return Err(NoEffect::Full);
                }
                if let Some(open) = self.state.invites.get_mut(&request.invite) {
                    open.used = open.used.saturating_add(1);
                }
                self.state.left.remove(&node);
                self.state.members.insert(
                    node,
                    Member {
                        name: request.name.clone(),
                        level: *level,
                        since_ms: event.time_ms,
                        invite: Some(request.invite),
                        by: (*level <= Level::Member).then_some(by),
                    },
                );
                Ok(())
            }
            Body::Left {} => {
                let members = &self.state.members;
                let member = members
                    .get(&event.author)
                    .ok_or(NoEffect::NotMember(event.author))?;
                let others = || members.iter().filter(|(node, _)| **node != event.author);
                if member.level == Level::Anchor
                    && others().next().is_some()
                    && others().all(|(_, other)| other.level != Level::Anchor)
                {
                    return Err(NoEffect::LastAnchor(event.author));
                }
                let gone = self.state.members.remove(&event.author);
                // A later revocation of the node closes this invite. Forget nodes whose invites are
                // closed.
                self.state.left.retain(|_, code| {
                    let open = self.state.invites.get(&code.0);
                    open.is_some_and(|open| !open.withdrawn && open.used < open.uses)
                });
                if let Some(invite) = gone.and_then(|member| member.invite)
                    && self.state.left.len() < MAX_MEMBERS
                {
                    self.state.left.insert(event.author, Code(invite));
                }
                Ok(())
            }
            Body::Named { name } => {
                let member = self
                    .state
                    .members
                    .get_mut(&event.author)
                    .ok_or(NoEffect::NotMember(event.author))?;
                if member.name == *name {
                    return Err(NoEffect::SameName(event.author));
                }
                member.name.clone_from(name);
                Ok(())
            }
            Body::Revoked { .. }
            | Body::LevelChanged { .. }
            | Body::ShardAdvertised(_)
            | Body::ShardWithdrawn { .. }
            | Body::NodeSeen { .. }
            | Body::GrantRevoked { .. }
            | Body::Unknown { .. } => Err(NoEffect::Nothing),
        }
    }

    /// Sets the frozen authors, which do not follow from the order of events.
    pub(super) fn set_frozen(&mut self, frozen: BTreeMap<NodeId, Fork>) {
        self.state.frozen = frozen;
    }
}
