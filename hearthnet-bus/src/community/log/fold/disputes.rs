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
        let id = ByteArray::new(dispute.id(&accuser));
        if state.disputes.contains_key(&id) {
            return Err(NoEffect::SameVerdict);
        }
        let group = state.group(self.root, &accuser, |by| {
            let by = state.members.get(by);
            by.is_some_and(|by| by.level == Level::Anchor)
        });
        // Only few outcomes are computed, because this event may come often and without effect.
        let mut open_of = BTreeMap::new();
        for (id, case) in &state.disputes {
            let is_party = case.is_party(&dispute.accused) || case.is_party(&accuser);
            if case.group != group && !is_party {
                continue;
            }
            let outcome = state.outcome(case);
            let is_member = state.members.contains_key(&case.accuser);
            if outcome.is_none() && case.group == group && is_member {
                let cases: &mut Vec<_> = open_of.entry(case.accuser).or_default();
                cases.push((case.time_ms, *id));
            }
            let guilty = outcome.map_or([None, None], |outcome| case.guilty(outcome));
            for node in [dispute.accused, accuser] {
                if guilty.contains(&Some(node)) {
                    return Err(NoEffect::Convicted(node));
                }
            }
            if outcome == Some(Finding::None) && case.accuser == accuser {
                return Err(NoEffect::FalseAccuser(accuser));
            }
        }
        if open_of.values().map(Vec::len).sum::<usize>() >= MAX_OPEN_DISPUTES {
            // The oldest dispute of the accuser with the most gives way, so a member that fills the
            // group with its own disputes does not keep others from accusing.
            let most = open_of.values().map(Vec::len).max().unwrap_or(0);
            let own = open_of.get(&accuser).map_or(0, Vec::len);
            if most <= own.max(1) {
                return Err(NoEffect::TooManyDisputes);
            }
            let all = open_of.values().filter(|cases| cases.len() == most);
            let oldest = all.flatten().min().map(|(_, id)| *id);
            let oldest = oldest.ok_or(NoEffect::TooManyDisputes)?;
            self.state.disputes.remove(&oldest);
        }
        if self.state.disputes.len() >= MAX_DISPUTES {
            let open = self.state.disputes.iter();
            let open = open.filter(|(_, case)| self.state.outcome(case).is_none());
            let oldest = open.map(|(id, case)| (case.time_ms, *id)).min();
            let (_, oldest) = oldest.ok_or(NoEffect::TooManyDisputes)?;
            self.state.disputes.remove(&oldest);
        }
        self.state.disputes.insert(
            id,
            Case {
                time_ms: event.time_ms,
                group,
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
