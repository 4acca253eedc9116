//! From durable events to members: what each kind does, and who may.
//!
//! Events are applied in the order of their [`Position`]s. Each is judged in the state just
//! before it; one that its author may not make has no effect.
//!
//! # Losing a level reaches back
//!
//! A revocation, and a change of level, names the last event of the node that its author had
//! seen. Later ones count for no more than the node has been left with, *also if they sort
//! before*: else whoever is put out or put down could go on as before by making events with
//! small Lamport times. So what an event does can depend on events after it, and the meaning of
//! a log is defined in three steps (`specs/event-log.md`):
//!
//! 1. The root's revocations and changes of level always hold. They give the first cuts: of a
//!    revoked node `node -> last event`, and of another one `node -> (level, last event)`.
//! 2. All events are applied under these cuts. This decides which revocations and changes by
//!    anchors hold: being an anchor depends on the root and on anchors only, never on those
//!    whom anchors may revoke or put down.
//! 3. If those cut off something that had an effect, all events are applied once more, under
//!    all cuts, and with the revocations of step 2.
//!
//! Normally nothing is cut off: the node's last event is in the event that takes its level.
//! Then one pass gives the same, and events that sort last can be applied as they come.
//! [`Fold::apply`] says when that shortcut is not open ([`Applied::Reaches`]).

use std::collections::{BTreeMap, BTreeSet};

use hearthnet_transport::Code as ErrorCode;
use serde::{Deserialize, Serialize};

use super::body::{Body, Level};
use super::community::{Code, Durable, Fork, Member, OpenInvite, Revocation};
use super::event::{Event, Position};
use crate::identity::raw_keys;
use crate::{CommunityId, NodeId};

/// Most members of a community, revoked ones included: heads and views list them all.
pub const MAX_MEMBERS: usize = 4096;

/// Most invites that are kept in the view; closed ones make room for new ones.
pub const MAX_INVITES: usize = 1024;

/// Why an event has no effect.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NoEffect {
    /// The author is no member, or not any more.
    #[error("{0} is not a member of this community")]
    NotMember(NodeId),
    /// The author was revoked, and the event is later than what counts of it.
    #[error("{0} was revoked")]
    Revoked(NodeId),
    /// The author's level is too low for this.
    #[error("this takes {needed} rights")]
    Level {
        /// Whose rights it takes.
        needed: &'static str,
    },
    /// The node that the event is about is no member.
    #[error("{0} is not a member of this community")]
    NoSuchMember(NodeId),
    /// The node that the event is about is a member already.
    #[error("{0} is a member already")]
    AlreadyMember(NodeId),
    /// The member has this level already.
    #[error("{0} has this level already")]
    SameLevel(NodeId),
    /// The member has this name already.
    #[error("{0} has this name already")]
    SameName(NodeId),
    /// The last anchor cannot leave the others alone.
    #[error("{0} is the last anchor, and others are still here")]
    LastAnchor(NodeId),
    /// The root key is no member: it cannot be admitted, promoted or revoked.
    #[error("the community's root key can be no member")]
    Root,
    /// No invite has this key.
    #[error("there is no such invite")]
    NoSuchInvite,
    /// An invite with this key exists already.
    #[error("an invite with this key exists already")]
    InviteExists,
    /// The invite was withdrawn, or its author may not invite any more.
    #[error("the invite was withdrawn")]
    InviteWithdrawn,
    /// The invite expired.
    #[error("the invite has expired")]
    InviteExpired,
    /// The invite was used as often as it may be.
    #[error("the invite was used already")]
    InviteUsed,
    /// The admission gives another level than the invite.
    #[error("the invite is for another level")]
    InviteLevel,
    /// There are [`MAX_MEMBERS`] members or [`MAX_INVITES`] open invites.
    #[error("the community is full")]
    Full,
    /// The kind does nothing in the durable state.
    #[error("this kind of event has no effect on the members")]
    Nothing,
}

impl NoEffect {
    /// The stable code of the refusal.
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

/// What became of an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Applied {
    /// It changed the state.
    Effect,
    /// It did not.
    None(NoEffect),
    /// It takes a level, and with it the ground of events which had an effect: the state must be
    /// made anew from all events. This one is not applied.
    Reaches,
}

/// Who acts: the order is that of their power.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Actor {
    Stranger,
    Member(Level),
    Root,
}

const ANCHOR: Actor = Actor::Member(Level::Anchor);

impl Actor {
    /// What is said to a member that has not the rights of this one.
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

    /// Who may invite others at `level`.
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

/// The state while events are applied, and what is needed to go on from it. This is what a
/// snapshot holds.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Fold {
    #[serde(with = "raw_keys")]
    root: NodeId,
    pub(super) state: Durable,
    /// Of these authors only events up to this one count.
    #[serde(with = "raw_keys::map")]
    cuts: BTreeMap<NodeId, u64>,
    /// What levels were set, by node: events that sort before one of these, but have a greater
    /// number than it names, are judged by no higher level.
    #[serde(default, with = "raw_keys::map")]
    levels: BTreeMap<NodeId, BTreeSet<LevelCut>>,
    /// The last event of each author that had an effect.
    #[serde(with = "raw_keys::map")]
    effective: BTreeMap<NodeId, u64>,
    /// Whose events had an effect in the second step or the third: what they signed belongs to
    /// the log even if they turn out never to have been members.
    acted: BTreeSet<[u8; 32]>,
    /// The revocations that hold, in the third step.
    decided: Option<BTreeSet<(u64, [u8; 32], u64)>>,
    /// The revocations by anchors that were found to hold.
    found: BTreeSet<(u64, [u8; 32], u64)>,
    /// The last event that was applied.
    at: Option<(u64, [u8; 32], u64)>,
    /// How many were applied.
    pub(super) count: u64,
}

/// A change of a member's level, as far as it binds what sorts before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
struct LevelCut {
    /// The position of the event.
    place: (u64, [u8; 32], u64),
    /// The last event of the member that its author had seen.
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

    /// Whether it is of this community.
    pub(super) fn is_of(&self, community: CommunityId) -> bool {
        self.root == community.root()
    }

    /// Whether the log has a place for this author's events: the root, everybody who is or was
    /// a member, and whoever else had a part in how things came to be so.
    pub(super) fn knows(&self, author: &NodeId) -> bool {
        self.state.knows(self.community(), author) || self.acted.contains(author.as_bytes())
    }

    /// The position of the last event that was applied.
    pub(super) fn at(&self) -> Option<Position> {
        self.at.map(|(lamport, author, seq)| Position {
            lamport,
            author: NodeId::from_checked(author),
            seq,
        })
    }

    /// Whether an event at this place could be applied now without going back.
    pub(super) fn is_before(&self, position: Position) -> bool {
        self.at.is_none_or(|at| at < key(position))
    }

    /// Whether events that sort last can be applied, and snapshots used: not when a
    /// revocation reached back, for then the state before it is not what it was.
    pub(super) fn is_plain(&self) -> bool {
        self.decided.is_none()
    }

    /// Whether an event of this author with at least this number had an effect.
    pub(super) fn had_effect(&self, author: &NodeId, from_seq: u64) -> bool {
        self.effective
            .get(author)
            .is_some_and(|seq| *seq >= from_seq)
    }

    /// Makes the state from all events, which `scan` hands over in their order, as often as
    /// it is called.
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
        let mut reaches = false;
        scan(&mut |event| {
            // What it cuts off is left in: this pass only decides which revocations hold.
            reaches |= second.step(event, true) == Applied::Reaches;
        })?;
        if !reaches {
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

    /// A fold that has applied nothing yet and comes to the state of this one when all events
    /// are applied to it again, with the same verdict on each.
    pub(super) fn replay(&self) -> Self {
        let mut replay = Self::new(self.community());
        replay.cuts.clone_from(&self.cuts);
        replay.levels.clone_from(&self.levels);
        replay.decided = Some(self.decided.as_ref().unwrap_or(&self.found).clone());
        replay
    }

    /// Applies the next event of a replay, and says what becomes of it.
    pub(super) fn again(&mut self, event: &Event) -> Result<(), NoEffect> {
        match self.step(event, true) {
            Applied::None(why) => Err(why),
            Applied::Effect | Applied::Reaches => Ok(()),
        }
    }

    /// Applies an event that sorts after all others. [`Applied::Reaches`] leaves the state as
    /// it was.
    pub(super) fn apply(&mut self, event: &Event) -> Applied {
        let takes = matches!(event.body, Body::Revoked { .. } | Body::LevelChanged { .. });
        if !self.is_plain() && takes {
            return Applied::Reaches;
        }
        self.step(event, false)
    }

    /// Whether an event that sorts after all others would have an effect.
    pub(super) fn check(&self, event: &Event) -> Result<(), NoEffect> {
        let mut after = self.clone();
        after.decided = None;
        match after.step(event, true) {
            Applied::None(why) => Err(why),
            Applied::Effect | Applied::Reaches => Ok(()),
        }
    }

    fn cut(&mut self, node: NodeId, last_seq: u64) {
        let cut = self.cuts.entry(node).or_insert(last_seq);
        *cut = last_seq.min(*cut);
    }

    /// Notes that `event` sets a level. Under the cuts of all events it is noted already.
    fn cut_level(&mut self, event: &Event, node: NodeId, level: Level, last_seq: u64) {
        let cut = LevelCut {
            place: key(event.position()),
            last_seq,
            level,
        };
        self.levels.entry(node).or_default().insert(cut);
    }

    /// Whether an event, the next one of a [replay](Self::replay), counts for less than its author's level
    /// at its place, for whoever took that level later had not seen it.
    pub(super) fn comes_too_late(&self, event: &Event) -> bool {
        let cut = self.cuts.get(&event.author);
        cut.is_some_and(|last| event.seq > *last)
            || self.actor(event) < self.state.actor(self.community(), &event.author)
    }

    /// As whom the author of an event acts: by its level then, or by what it has been left with
    /// by somebody who had not seen this event.
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
        if applied == Applied::Reaches && !go_on {
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
        // The root's word on a level binds the past whatever it finds there: it is in the first cuts.
        let by_root = level.is_some() && actor == Actor::Root;
        let binds = last_seq.filter(|_| holds.is_ok() || by_root);
        let reaches = self.decided.is_none()
            && binds.is_some_and(|last| self.had_effect(&node, last.saturating_add(1)));
        if reaches && !go_on {
            return Applied::Reaches;
        }
        match (binds, level) {
            (Some(last), None) => self.cut(node, last),
            (Some(last), Some(level)) => self.cut_level(event, node, level, last),
            (None, _) => {}
        }
        match (holds, level) {
            (Err(why), _) => return Applied::None(why),
            (Ok(()), None) => self.put_out(event, actor, node, last_seq.unwrap_or(0)),
            (Ok(()), Some(level)) => {
                if let Some(member) = self.state.members.get_mut(&node) {
                    member.level = level;
                }
            }
        }
        match reaches {
            true => Applied::Reaches,
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

    fn put_out(&mut self, event: &Event, actor: Actor, node: NodeId, last_seq: u64) {
        if actor != Actor::Root {
            self.found.insert(key(event.position()));
        }
        // Who is put out has the code that let it in, and could come back with another key; so has
        // who left before that.
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

    /// Whoever came by this invite, and is not among those of whom its end names all that were known then,
    /// was let in afterwards by an event that is dated back.
    fn put_out_unnamed(&mut self, invite: &NodeId, named: &BTreeSet<NodeId>, actor: Actor) {
        let came = self.state.members.extract_if(.., |node, member| {
            let anchor = member.level == Level::Anchor && actor != Actor::Root;
            member.invite == Some(*invite) && !named.contains(node) && !anchor
        });
        // What they have signed stays in the log.
        self.acted.extend(came.map(|(node, _)| *node.as_bytes()));
    }

    fn has_room(&self) -> bool {
        self.state.members.len() + self.state.revoked.len() < MAX_MEMBERS
    }

    /// Every kind but those that take a level.
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
                // By its form it is a first event of the root: of two branches, that of one counts.
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
                    self.put_out_unnamed(invite, members, actor);
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
                // Who admits vouches that the invite had not expired by its clock, so it
                // stands at least as high as the one whom it lets in.
                at_least(Actor::Member(open.level.max(Level::Trusted)))?;
                // Its own invite was withdrawn with it: this is the reason that it is told.
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
                // Whoever puts it out yet closes its code: kept as long as that can matter.
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

    /// Notes who is frozen, which does not follow from the order of events.
    pub(super) fn set_frozen(&mut self, frozen: BTreeMap<NodeId, Fork>) {
        self.state.frozen = frozen;
    }
}
