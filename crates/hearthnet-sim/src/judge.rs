//! Judge of disputes: it checks the evidence of a caller's audits as an anchor does
//! (`specs/disputes.md` 6), and that its finding names hosts that have lied.

use std::sync::Arc;

use hearthnet_bus::NodeId;
use hearthnet_bus::evidence::Evidence;
use hearthnet_bus::log::Finding;
use hearthnet_engine::ARITHMETIC;
use hearthnet_orchestrator::sharded::recompute;
use hearthnet_testkit::one_thread;

use crate::lies::Lies;
use crate::model::Model;
use crate::observer::Actor;

/// Judge of one caller's disputes.
pub(crate) struct Judge {
    pub(crate) caller: NodeId,
    pub(crate) model: Arc<Model>,
    pub(crate) actor: Actor,
    pub(crate) lies: Lies,
}

impl Judge {
    pub(crate) fn judge(&self, evidence: &Evidence) {
        let finding = self.finding(evidence);
        let dispute = evidence.dispute([0; 32], 0);
        let named = match &finding {
            Ok(Finding::Accused) => vec![dispute.accused],
            Ok(Finding::Witness) => dispute.witness.into_iter().collect(),
            Ok(Finding::Both) => [dispute.accused]
                .into_iter()
                .chain(dispute.witness)
                .collect(),
            _ => Vec::new(),
        };
        let accused = dispute.accused.short();
        let event = format!("dispute with {accused}, finding: {finding:?}");
        self.actor.note(event);
        self.actor.check(!named.is_empty(), || {
            format!("the dispute with {accused} proves nothing: {finding:?}")
        });
        for host in named {
            self.actor.check(self.lies.is_liar(&host), || {
                format!("{} is found guilty, and never lied", host.short())
            });
        }
    }

    fn finding(&self, evidence: &Evidence) -> Result<Finding, String> {
        let dispute = evidence.dispute([0; 32], 0);
        let checked = evidence.check(&self.caller, &dispute, ARITHMETIC);
        checked.map_err(|fault| fault.to_string())?;
        let (boundary, width) = (self.model.boundary(), self.model.width());
        let (mut rows, mut encoded) = (Vec::new(), Vec::new());
        let decoded = boundary.decode(&evidence.rows, &mut rows);
        decoded.map_err(|error| error.to_string())?;
        let (lo, hi) = dispute.layers;
        let computed = recompute(&self.model.file, lo..hi + 1, &one_thread(), &rows)
            .map_err(|error| error.to_string())?;
        boundary.encode(&computed, &mut encoded);
        Ok(evidence.finding(&encoded, width * boundary.bytes_per_value()))
    }
}
