//! Receipts of a host, compared with what this node sent to it and received from it
//! (`specs/receipts.md`).
//!
//! ```text
//! results in order ─► claims ─┐
//!                             ├─ a receipt counts as many claims: chain, signature ─► signed claims
//! receipts, at any time ──────┘
//! ```
//!
//! [`Ledger`] is pure. A receipt may arrive before the chat has read the results that it covers, and
//! after the stream has ended.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};

use hearthnet_bus::NodeId;
use hearthnet_bus::receipt::{Claim, Inputs, SignedClaims, Statement};
use hearthnet_transport::{Code, Receipt};
use parking_lot::Mutex;

use crate::hosts::audits::AuditResult;
use crate::hosts::health::{FailureKind, SharedHealth};

/// Claims of a stream that are kept, signed or not: 1.2 MiB.
const MAX_CLAIMS: usize = 1 << 14;

/// Code of a host with a wrong receipt.
pub(crate) const RECEIPT_MISMATCH: Code = Code::new("receipt_mismatch");

/// Reason why a receipt is wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum ReceiptFault {
    #[error("a receipt does not cover more than the one before it")]
    Order,
    #[error("a receipt counts more answers than this node asked for")]
    Ahead,
    #[error("a receipt is for other rows than those that were sent and returned")]
    Rows,
    #[error("the signature of a receipt is not valid")]
    Signature,
}

/// Claims of one stream epoch.
#[derive(Debug)]
pub(crate) struct Ledger {
    /// With the claims that are signed.
    statement: Statement,
    /// Bytes of a row sent, and of one returned.
    row_bytes: (usize, usize),
    inputs: Inputs,
    /// Claims that are not signed yet; `None` once they could not be kept.
    open: Option<VecDeque<Claim>>,
    /// Steps of which rows were asked for.
    asked: u32,
    /// Receipt that covers answers which have not been read yet.
    pending: Option<Receipt>,
    signed: Vec<SignedClaims>,
}

impl Ledger {
    /// `statement`: what the host's receipts say, without claims. `row_bytes`: of a row sent, and of
    /// one returned.
    pub(crate) fn new(statement: Statement, row_bytes: (usize, usize)) -> Self {
        Self {
            statement,
            row_bytes,
            inputs: Inputs::default(),
            open: Some(VecDeque::new()),
            asked: 0,
            pending: None,
            signed: Vec::new(),
        }
    }

    /// Begins with the first `position` rows of another stream.
    pub(crate) fn fork_of(&mut self, source: &Self, position: u32) {
        self.inputs = source.inputs.fork(position);
    }

    /// A step was sent whose rows come back.
    pub(crate) fn asked(&mut self) {
        self.asked = self.asked.saturating_add(1);
    }

    /// Takes in the answer to a step: the rows sent from `position` on, and the `rows` returned ones.
    ///
    /// # Errors
    /// The fault of a receipt that covers this answer.
    pub(crate) fn answered(
        &mut self,
        position: u32,
        sent: &[u8],
        rows: u32,
        returned: &[u8],
    ) -> Result<(), ReceiptFault> {
        let is_whole = self.inputs.extend(position, sent, self.row_bytes.0);
        let claim = Claim::new(&self.inputs, rows, returned);
        if let Some(open) = &mut self.open {
            open.extend(claim);
            // Without its receipts, nothing of the rest of the stream can be audited.
            if !is_whole || open.len() > MAX_CLAIMS {
                self.open = None;
            }
        }
        self.compare()
    }

    /// Takes in a receipt of the host.
    ///
    /// # Errors
    /// Its fault.
    pub(crate) fn received(&mut self, receipt: Receipt) -> Result<(), ReceiptFault> {
        let claims = receipt.claims.get();
        let before = self.pending.map(|pending| pending.claims.get());
        if claims <= before.unwrap_or(self.statement.claims) {
            return Err(ReceiptFault::Order);
        }
        if claims > self.asked {
            return Err(ReceiptFault::Ahead);
        }
        // It covers what an earlier one covers.
        self.pending = Some(receipt);
        self.compare()
    }

    /// Returns true if claims are kept.
    pub(crate) fn has_claims(&self) -> bool {
        !self.signed.is_empty() || self.open.as_ref().is_some_and(|open| !open.is_empty())
    }

    /// Returns true if no receipt is expected any more: all answers are signed, or none of them can be.
    pub(crate) fn is_settled(&self) -> bool {
        self.open.as_ref().is_none_or(VecDeque::is_empty)
    }

    /// Returns true if the caller has read the answers to all its steps, and some of them are not
    /// signed.
    pub(crate) fn owes_receipt(&self) -> bool {
        let open = self.open.as_ref().map_or(0, VecDeque::len);
        let read = self.statement.claims as usize + open;
        open > 0 && self.pending.is_none() && read == self.asked as usize
    }

    /// Claims of rows that are all among `rows`, the first of them at `position`, which must be behind
    /// the same rows as those of the stream. Each with whether it returned these rows.
    fn compared<'a>(&'a self, position: u32, rows: &'a [u8]) -> impl Iterator<Item = bool> + 'a {
        let claims = self.signed.iter().flat_map(|signed| &signed.claims);
        let claims = claims.chain(self.open.iter().flatten());
        // Not those of rows that were replaced since.
        let claims = claims.filter(move |claim| self.inputs.hash(claim.end) == Some(claim.input));
        let at = move |row: u32| Some(row.checked_sub(position)? as usize * self.row_bytes.1);
        claims.filter_map(move |claim| {
            let first = claim.end.checked_sub(claim.rows)?;
            Some(claim.returned(rows.get(at(first)?..at(claim.end)?)?))
        })
    }

    /// Takes the signed claims since the last time.
    pub(crate) fn take_signed(&mut self) -> Vec<SignedClaims> {
        std::mem::take(&mut self.signed)
    }

    /// Compares the receipt that waits, if all answers that it covers are there.
    fn compare(&mut self) -> Result<(), ReceiptFault> {
        let (Some(receipt), Some(open)) = (self.pending, &mut self.open) else {
            return Ok(());
        };
        let count = receipt.claims.get().saturating_sub(self.statement.claims) as usize;
        if count > open.len() {
            return Ok(());
        }
        self.pending = None;
        let claims: Vec<Claim> = open.drain(..count).collect();
        let before = self.statement.chain;
        let chain = claims
            .iter()
            .fold(before, |chain, claim| claim.after(chain));
        if chain != receipt.chain {
            // No later receipt can be right.
            self.open = None;
            return Err(ReceiptFault::Rows);
        }
        (self.statement.claims, self.statement.chain) = (receipt.claims.get(), chain);
        let signature = receipt.signature;
        if self.statement.verify(&signature).is_err() {
            self.open = None;
            return Err(ReceiptFault::Signature);
        }
        self.signed.push(SignedClaims {
            statement: self.statement.clone(),
            signature,
            before,
            claims,
        });
        let mut kept: usize = self.signed.iter().map(|signed| signed.claims.len()).sum();
        while kept > MAX_CLAIMS {
            kept -= self.signed.remove(0).claims.len();
        }
        Ok(())
    }
}

/// Receipts of one stream, shared by its chat and the reader of its session.
#[derive(Debug)]
pub(crate) struct StreamReceipts {
    ledger: Mutex<Ledger>,
    host: NodeId,
    health: SharedHealth,
    suspected: AtomicBool,
}

impl StreamReceipts {
    pub(crate) fn new(ledger: Ledger, health: SharedHealth) -> Self {
        Self {
            host: ledger.statement.host,
            ledger: Mutex::new(ledger),
            health,
            suspected: AtomicBool::new(false),
        }
    }

    /// Runs `look` with the ledger, and counts the claims that were signed meanwhile.
    pub(crate) fn look<T>(&self, look: impl FnOnce(&mut Ledger) -> T) -> T {
        let mut ledger = self.ledger.lock();
        let before = ledger.statement.claims;
        let out = look(&mut ledger);
        let signed = ledger.statement.claims.saturating_sub(before);
        drop(ledger);
        if signed > 0 {
            self.health
                .look(|all, now| all.signed(&self.host, signed, now));
        }
        out
    }

    /// See [`Ledger::fork_of`].
    pub(crate) fn fork_of(&self, source: &Self, position: u32) {
        let source = source.ledger.lock();
        self.ledger.lock().fork_of(&source, position);
    }

    /// Compares rows that another host or this machine computed with the claims of the stream. Returns
    /// false if one differs; the stream is then audited.
    pub(crate) fn compare(&self, position: u32, rows: &[u8]) -> bool {
        let ledger = self.ledger.lock();
        let (mut same, mut differ) = (0, 0);
        for is_same in ledger.compared(position, rows) {
            *match is_same {
                true => &mut same,
                false => &mut differ,
            } += 1;
        }
        drop(ledger);
        self.health.look(|all, now| {
            all.audited(&self.host, AuditResult::Confirmed, same, now);
            all.audited(&self.host, AuditResult::Mismatch, differ, now);
        });
        if differ > 0 {
            self.suspect();
        }
        differ == 0
    }

    /// Lets the stream be audited without a draw.
    pub(crate) fn suspect(&self) {
        self.suspected.store(true, Ordering::Release);
    }

    /// Takes note of a wrong receipt. If it is for other rows than those that came, the host
    /// contradicts itself, which counts as an audit. The signed claims before it are audited.
    pub(crate) fn note_fault(&self, fault: ReceiptFault) {
        metrics::counter!("distributed_inference_shard_corruption_detected_total").increment(1);
        if fault == ReceiptFault::Rows {
            let mismatch = AuditResult::Mismatch;
            self.health
                .look(|all, now| all.audited(&self.host, mismatch, 1, now));
        }
        self.suspect();
    }

    /// Returns true if rows or a receipt of the stream were found to be wrong, or another host's.
    pub(crate) fn is_suspected(&self) -> bool {
        self.suspected.load(Ordering::Acquire)
    }

    /// Counts a wrong receipt that came after the end of its stream.
    pub(crate) fn blame(&self, fault: ReceiptFault) {
        let host = self.host.short();
        tracing::warn!(%host, code = %RECEIPT_MISMATCH, "a host has failed: {fault}");
        self.note_fault(fault);
        self.health.failed(&self.host, FailureKind::Corruption);
    }
}

#[cfg(test)]
mod tests {
    use hearthnet_bus::NodeKey;
    use proptest::prelude::*;

    use super::*;

    const ROW: usize = 4;

    fn key() -> NodeKey {
        NodeKey::from_secret(&[1; 32])
    }

    fn statement() -> Statement {
        Statement {
            host: key().id(),
            caller: NodeKey::from_secret(&[2; 32]).id(),
            weights: [6; 32],
            layers: (2, 5),
            arithmetic: "canonical-1".into(),
            stream: 7,
            epoch: 1,
            claims: 0,
            chain: [0; 32],
        }
    }

    /// The host's side.
    struct Host {
        statement: Statement,
        inputs: Inputs,
    }

    impl Host {
        fn new() -> Self {
            Self {
                statement: statement(),
                inputs: Inputs::default(),
            }
        }

        fn answered(&mut self, position: u32, rows: &[u8], returned: &[u8]) {
            assert!(self.inputs.extend(position, rows, ROW));
            let rows = (returned.len() / ROW) as u32;
            if let Some(claim) = Claim::new(&self.inputs, rows, returned) {
                self.statement.chain = claim.after(self.statement.chain);
                self.statement.claims += 1;
            }
        }

        fn receipt(&self) -> Receipt {
            Receipt {
                stream: 7,
                epoch: 1,
                claims: self.statement.claims.try_into().unwrap(),
                chain: self.statement.chain,
                signature: self.statement.sign(&key()),
            }
        }
    }

    fn ledger() -> Ledger {
        Ledger::new(statement(), (ROW, ROW))
    }

    /// A ledger and a host after one step.
    fn after_a_step() -> (Ledger, Host) {
        let (mut own, mut host) = (ledger(), Host::new());
        own.asked();
        own.answered(0, &[1; 2 * ROW], 1, &[3; ROW]).unwrap();
        host.answered(0, &[1; 2 * ROW], &[3; ROW]);
        (own, host)
    }

    #[test]
    fn a_receipt_of_the_same_rows_is_kept_with_its_claims() {
        let (mut own, host) = after_a_step();
        own.received(host.receipt()).unwrap();
        let [signed] = &own.signed[..] else {
            panic!("one receipt");
        };
        assert_eq!((signed.before, signed.claims.len()), ([0; 32], 1));
        assert_eq!(signed.statement, host.statement);
        assert_eq!(own.received(host.receipt()), Err(ReceiptFault::Order));
    }

    #[test]
    fn a_receipt_of_other_rows_is_found_out_whichever_rows_differ() {
        for (sent, returned) in [([2; 2 * ROW], [3; ROW]), ([1; 2 * ROW], [4; ROW])] {
            let (mut own, mut host) = (after_a_step().0, Host::new());
            host.answered(0, &sent, &returned);
            assert_eq!(own.received(host.receipt()), Err(ReceiptFault::Rows));
        }
    }

    #[test]
    fn a_receipt_of_another_key_stream_or_range_is_found_out() {
        let changes: [fn(&mut Statement); 4] = [
            |s| s.layers.1 += 1,
            |s| s.stream += 1,
            |s| s.caller = s.host,
            |s| s.arithmetic = "torch-cpu-fp32".into(),
        ];
        for change in changes {
            let (mut own, mut host) = after_a_step();
            change(&mut host.statement);
            assert_eq!(own.received(host.receipt()), Err(ReceiptFault::Signature));
        }
        let (mut own, host) = after_a_step();
        let other = NodeKey::from_secret(&[9; 32]);
        let receipt = Receipt {
            signature: host.statement.sign(&other),
            ..host.receipt()
        };
        assert_eq!(own.received(receipt), Err(ReceiptFault::Signature));
    }

    #[test]
    fn a_receipt_waits_for_the_answers_that_it_covers_and_for_no_others() {
        let (mut own, mut host) = after_a_step();
        own.asked();
        host.answered(2, &[5; ROW], &[6; ROW]);
        own.received(host.receipt()).unwrap();
        assert!(own.signed.is_empty());
        assert_eq!(
            own.answered(2, &[5; ROW], 1, &[7; ROW]),
            Err(ReceiptFault::Rows)
        );

        let (mut own, mut host) = after_a_step();
        host.answered(2, &[5; ROW], &[6; ROW]);
        assert_eq!(own.received(host.receipt()), Err(ReceiptFault::Ahead));
    }

    #[test]
    fn claims_without_receipts_are_forgotten_at_the_limit() {
        let mut own = ledger();
        for position in 0..=MAX_CLAIMS as u32 {
            own.asked();
            own.answered(position, &[1; ROW], 1, &[2; ROW]).unwrap();
        }
        assert!(own.open.is_none());
    }

    proptest! {
        /// Whatever the steps, and whenever receipts come, those of an honest host are right.
        #[test]
        fn an_honest_host_is_never_blamed(
            steps in proptest::collection::vec((0u32..30, 1u8..6, 0u8..3, any::<bool>(), any::<bool>()), 1..40),
        ) {
            let (mut own, mut host) = (ledger(), Host::new());
            let mut unread = Vec::new();
            for (number, (from, rows, want, reads, signs)) in (0u8..).zip(steps) {
                let position = from.min(host.inputs.length());
                let sent = vec![number; ROW * rows as usize];
                let back = match want {
                    0 => 0,
                    1 => 1,
                    _ => rows,
                };
                let returned = vec![number.wrapping_mul(7); ROW * back as usize];
                if back > 0 {
                    own.asked();
                }
                host.answered(position, &sent, &returned);
                unread.push((position, sent, u32::from(back), returned));
                let is_new = host.statement.claims > own.statement.claims
                    && own.pending.is_none_or(|p| p.claims.get() < host.statement.claims);
                if signs && is_new {
                    prop_assert_eq!(own.received(host.receipt()), Ok(()));
                }
                if reads {
                    for (position, sent, rows, returned) in unread.drain(..) {
                        prop_assert_eq!(own.answered(position, &sent, rows, &returned), Ok(()));
                    }
                    prop_assert!(own.pending.is_none());
                }
            }
        }
    }
}
