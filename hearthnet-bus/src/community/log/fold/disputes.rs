//! Effects of disputes and verdicts (`specs/disputes.md` 7).

use std::collections::BTreeMap;

use serde_bytes::ByteArray;

use super::Fold;
use super::no_effect::NoEffect;
use crate::NodeId;
use crate::community::log::body::Level;
use crate::community::log::dispute::{
    Case, Dispute, Finding, MAX_DISPUTES, MAX_JUDGES, MAX_OPEN_DISPUTES,
};
use crate::community::log::event::Event;

impl Fold {
    pub(super) fn dispute(&mut self, event: &Event, dispute: &Dispute) -> Result<(), NoEffect> {
        let (accuser, state) = (event.author, &self.state);
        if !state.members.contains_key(&accuser) {
            return Err(NoEffect::NotMember(accuser));
        }
        for host in dispute.hosts() {
            if host == accuser {
                return Err(NoEffect::OwnDispute(host));
            }
            if !state.members.contains_key(&host) {
                return Err(NoEffect::NoSuchMember(host));
            }
        }
        let reputations = state.reputations();
        let of = |node: &NodeId| reputations.get(node).copied().unwrap_or_default();
        for node in [dispute.accused, accuser] {
            if of(&node).is_convicted() {
                return Err(NoEffect::Convicted(node));
            }
        }
        if of(&accuser).is_false_accuser() {
            return Err(NoEffect::FalseAccuser(accuser));
        }
        let id = ByteArray::new(dispute.id(&accuser));
        if state.disputes.contains_key(&id) {
            return Err(NoEffect::SameVerdict);
        }
        let open = state.disputes.iter();
        let open: BTreeMap<_, _> = open
            .filter(|(_, case)| state.outcome(case).is_none())
            .map(|(id, case)| ((case.time_ms, *id), case.accuser))
            .collect();
        let group = |node: &NodeId| {
            state.group(self.root, node, |by| {
                let by = state.members.get(by);
                by.is_some_and(|by| by.level == Level::Anchor)
            })
        };
        let own = group(&accuser);
        let of_group = open.values().filter(|other| group(other) == own);
        if of_group.count() >= MAX_OPEN_DISPUTES {
            return Err(NoEffect::TooManyDisputes);
        }
        if state.disputes.len() >= MAX_DISPUTES {
            let oldest = open.first_key_value();
            let ((_, oldest), _) = oldest.ok_or(NoEffect::TooManyDisputes)?;
            let oldest = *oldest;
            self.state.disputes.remove(&oldest);
        }
        self.state.disputes.insert(
            id,
            Case {
                time_ms: event.time_ms,
                accuser,
                dispute: dispute.clone(),
                verdicts: BTreeMap::new(),
            },
        );
        Ok(())
    }

    /// The caller has checked that the judge is an anchor or the root.
    pub(super) fn judge_dispute(
        &mut self,
        judge: NodeId,
        id: &[u8; 32],
        finding: Finding,
    ) -> Result<(), NoEffect> {
        // The root is no node: it has no key for evidence, and would let an anchor judge twice.
        if judge == self.root {
            return Err(NoEffect::Root);
        }
        let case = self.state.disputes.get_mut(&ByteArray::new(*id));
        let case = case.ok_or(NoEffect::NoSuchDispute)?;
        if case.is_party(&judge) {
            return Err(NoEffect::OwnDispute(judge));
        }
        let before = case.verdicts.get(&judge).copied();
        let needs_witness = matches!(finding, Finding::Witness | Finding::Both);
        if needs_witness && case.dispute.witness.is_none() || before == Some(finding) {
            return Err(NoEffect::SameVerdict);
        }
        match finding {
            Finding::Withdrawn => {
                let withdrawn = case.verdicts.remove(&judge);
                withdrawn.ok_or(NoEffect::SameVerdict)?;
            }
            _ if before.is_none() && case.verdicts.len() >= MAX_JUDGES => {
                return Err(NoEffect::TooManyDisputes);
            }
            _ => {
                case.verdicts.insert(judge, finding);
            }
        }
        Ok(())
    }
}
