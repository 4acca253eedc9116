//! Results of receipts and audits of a host (`specs/receipts.md`).

use serde::{Deserialize, Serialize};

/// How much of a host's answers its receipts cover, and what audits found, since this process started.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct AuditCounts {
    /// Steps that it answered with rows.
    pub answers: u64,
    /// Answers that a receipt covers: only these can be audited.
    pub signed: u64,
    /// Answers that were computed again elsewhere, to the same bits.
    pub confirmed: u64,
    /// Answers that were other rows elsewhere, and wrong receipts for answers. Which host was wrong
    /// is in its failures.
    pub mismatches: u64,
    /// Answers that were drawn, but that no other host could compute.
    pub not_auditable: u64,
}

/// Result of an audit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case", const_into_str)]
pub(crate) enum AuditResult {
    Confirmed,
    Mismatch,
    /// No other host could compute the rows.
    NotAuditable,
}

impl AuditCounts {
    pub(super) fn note(&mut self, result: AuditResult, answers: u64) {
        *match result {
            AuditResult::Confirmed => &mut self.confirmed,
            AuditResult::Mismatch => &mut self.mismatches,
            AuditResult::NotAuditable => &mut self.not_auditable,
        } += answers;
    }
}
