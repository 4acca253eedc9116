//! Rights: the role in which an author acts, and what it takes.

use super::no_effect::NoEffect;
use super::{Fold, MAX_MEMBERS};
use crate::community::log::body::Level;
use crate::community::log::community::Durable;
use crate::community::log::event::Event;
use crate::{CommunityId, NodeId};

/// Role of an event's author, in rising order of power.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Actor {
    Stranger,
    Member(Level),
    Root,
}

pub(super) const ANCHOR: Actor = Actor::Member(Level::Anchor);

impl Actor {
    /// Error for an author that lacks this role.
    pub(super) fn needed(self) -> NoEffect {
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
    pub(super) fn actor(&self, community: CommunityId, node: &NodeId) -> Actor {
        if *node == community.root() {
            return Actor::Root;
        }
        self.members
            .get(node)
            .map_or(Actor::Stranger, |member| Actor::Member(member.level))
    }

    /// Minimum role for inviting others at `level`.
    pub(super) fn inviter(&self, level: Level) -> Actor {
        match level {
            Level::Member => Actor::Member(self.policy.who_may_invite),
            Level::Trusted => ANCHOR,
            Level::Anchor => Actor::Root,
        }
    }

    pub(in crate::community::log) fn may_invite(
        &self,
        community: CommunityId,
        node: &NodeId,
        level: Level,
    ) -> bool {
        self.actor(community, node) >= self.inviter(level)
    }

    pub(in crate::community::log) fn knows(&self, community: CommunityId, author: &NodeId) -> bool {
        *author == community.root()
            || self.members.contains_key(author)
            || self.revoked.contains_key(author)
    }
}

impl Fold {
    /// Role in which the author of an event acts: its level at that position, limited by later
    /// changes of level whose authors had not seen the event.
    pub(super) fn actor(&self, event: &Event) -> Actor {
        let actor = self.state.actor(self.community(), &event.author);
        let place = event.position();
        let cuts = self.levels.get(&event.author).into_iter().flatten();
        let later = cuts.filter(|cut| event.seq > cut.last_seq && place < cut.place);
        match later.map(|cut| Actor::Member(cut.level)).min() {
            Some(left) if actor != Actor::Root => actor.min(left),
            _ => actor,
        }
    }

    pub(super) fn may_revoke(
        &self,
        event: &Event,
        actor: Actor,
        node: &NodeId,
    ) -> Result<(), NoEffect> {
        match (&self.decided, actor) {
            _ if *node == self.root => return Err(NoEffect::Root),
            (_, Actor::Root) => {}
            (Some(decided), _) if decided.contains(&event.position()) => {}
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

    pub(super) fn may_set_level(
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

    pub(super) fn has_room(&self) -> bool {
        self.state.members.len() + self.state.revoked.len() < MAX_MEMBERS
    }
}
