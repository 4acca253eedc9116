//! Whether an event may have its effect, and the effect of each kind.

use std::collections::BTreeSet;

use serde_bytes::ByteArray;

use super::no_effect::NoEffect;
use super::rights::{ANCHOR, Actor};
use super::{Effect, Fold, MAX_INVITES, MAX_MEMBERS, MAX_MODELS, is_cut_off};
use crate::NodeId;
use crate::community::log::body::{Body, Level};
use crate::community::log::community::{Member, OpenInvite, Revocation};
use crate::community::log::event::Event;
use crate::identity::raw_keys::RawKey;

impl Fold {
    /// Applies an event, if its author may make it.
    pub(super) fn judge(&mut self, event: &Event, go_on: bool) -> Result<Effect, NoEffect> {
        if is_cut_off(&self.cuts, &event.author, event.seq) {
            return Err(NoEffect::Revoked(event.author));
        }
        let (node, last_seq, level) = match event.body {
            Body::Revoked { node, last_seq } => (node, Some(last_seq), None),
            Body::LevelChanged {
                node,
                level,
                last_seq,
            } => (node, last_seq, Some(level)),
            _ => return self.change(event).map(|()| Effect::Plain),
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
            return Ok(Effect::Retroactive);
        }
        match (binds, level) {
            (Some(last), None) => self.cut(node, last),
            (Some(last), Some(level)) => self.cut_level(event, node, level, last),
            (None, _) => {}
        }
        holds?;
        match level {
            None => self.apply_revocation(event, actor, node, last_seq.unwrap_or(0)),
            Some(level) => {
                if let Some(member) = self.state.members.get_mut(&node) {
                    member.level = level;
                }
            }
        }
        Ok(match retroactive {
            true => Effect::Retroactive,
            false => Effect::Plain,
        })
    }

    fn apply_revocation(&mut self, event: &Event, actor: Actor, node: NodeId, last_seq: u64) {
        if actor != Actor::Root {
            let cut = (RawKey(node), last_seq);
            self.found.insert(event.position(), cut);
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
                            gave: None,
                        },
                    );
                }
            }
            Body::PolicyChanged(policy) => {
                at_least(ANCHOR)?;
                self.state.policy = *policy;
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
                    let invites = &mut self.state.invites;
                    invites.retain(|_, invite| invite.is_open(now));
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
                        gave: None,
                    },
                );
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
                    self.state.left.insert(event.author, RawKey(invite));
                }
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
            }
            Body::ModelAdopted(adoption) => {
                at_least(ANCHOR)?;
                let models = &mut self.state.models;
                let weights = ByteArray::new(adoption.weights);
                if models.len() >= MAX_MODELS && !models.contains_key(&weights) {
                    return Err(NoEffect::TooManyModels);
                }
                models.insert(weights, adoption.clone());
            }
            Body::ModelDropped { weights } => {
                at_least(ANCHOR)?;
                let dropped = self.state.models.remove(&ByteArray::new(*weights));
                dropped.ok_or(NoEffect::ModelNotAdopted)?;
            }
            Body::Disputed(dispute) => self.dispute(event, dispute)?,
            Body::Judged { dispute, finding } => {
                at_least(ANCHOR)?;
                self.judge_dispute(event.author, dispute, *finding)?;
            }
            Body::NodeGave(gave) => {
                let member = self.state.members.get_mut(&event.author);
                let member = member.ok_or(NoEffect::NotMember(event.author))?;
                let before = member.gave.as_ref();
                if !gave.follows(before, member.since_ms, event.time_ms) {
                    return Err(NoEffect::GaveNothingNew(event.author));
                }
                member.gave = Some(*gave);
            }
            Body::Revoked { .. }
            | Body::LevelChanged { .. }
            | Body::ShardAdvertised(_)
            | Body::ShardWithdrawn { .. }
            | Body::NodeMeasured(_)
            | Body::NodeSeen { .. }
            | Body::GrantRevoked { .. }
            | Body::Unknown { .. } => return Err(NoEffect::Nothing),
        }
        Ok(())
    }
}
