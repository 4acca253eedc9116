//! Audits: spans of an answer, computed again by other hosts when this process has nothing else to do
//! (`specs/receipts.md` 4).
//!
//! ```text
//! end of a call ─► candidate ─► receipts came ─► drawn by lot ─► no call runs ─► other hosts ─► compare
//!                  (rows of each span)                                             │ differ
//!                                                                                  └─► a third opinion
//! ```
//!
//! One thread of the process does all audits, one after the other. Other hosts get the rows that a host
//! of the span gets, and nothing else.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::LocalBoxFuture;
use hearthnet_bus::NodeId;
use hearthnet_bus::evidence::Evidence;
use hearthnet_bus::receipt::{Claim, SignedClaims};
use hearthnet_engine::ARITHMETIC;
use tokio::runtime::Handle;
use tokio::sync::mpsc::error::TrySendError;
use tokio::time::{Instant, sleep};

use super::audit_queue;
use super::audit_span::{AuditSpan, RecomputeHere};
use super::stream::Hop;
use super::{PumpSettings, ShardedBackend};
use crate::Cancel;
use crate::backend::{Backend as _, Rows, Run};
use crate::error::ChatError;
use crate::exact::Exact;
use crate::hosts::audits::AuditResult;
use crate::hosts::health::{FailureKind, SharedHealth};
use crate::hosts::receipts::{Ledger, StreamReceipts};
use crate::hosts::{Choice, HostSource, ModelOnWire, RoutedSpan, Search};

/// How long the last receipt of a call may take after its end.
const RECEIPT_TIMEOUT: Duration = Duration::from_secs(5);
/// How long after the end of its call an audit waits until no call runs. A busy process audits all
/// the same.
const IDLE_TIMEOUT: Duration = Duration::from_secs(60);
/// Interval between looks at what an audit waits for.
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// Most memory for the values of an audit's rows: 29,000 positions of 576 values, 4,096 of 4,096.
pub(super) const MAX_BYTES: usize = 64 << 20;
/// How long an audit waits for room on other hosts.
const ROOM_TIMEOUT: Duration = Duration::from_secs(5);
/// Routes that an audit tries. A host that starts an audit and does not finish it is not asked again.
const ROUTES: usize = 3;

/// Spans of a call, and where to find other hosts.
pub(super) struct Candidate {
    pub(super) source: Box<dyn HostSource>,
    pub(super) runtime: Handle,
    pub(super) settings: PumpSettings,
    pub(super) here: Option<RecomputeHere>,
    pub(super) spans: Vec<AuditSpan>,
    /// End of the call.
    ended: Instant,
}

/// Waits until `is` holds, at most until `until`. Its timers are those of the audits' own runtime,
/// which outlives that of a candidate.
async fn wait(until: Instant, is: impl Fn() -> bool) {
    while !is() && Instant::now() < until {
        sleep(LOOK_EVERY).await;
    }
}

/// Waits until all answers of a stream are signed, or cannot be, at most until `until`.
async fn receipts_come(until: Instant, receipts: &StreamReceipts) {
    wait(until, || receipts.look(|ledger| ledger.is_settled())).await;
}

/// Draws whether a span is audited, which this share of them is. Without randomness it is not.
pub fn is_drawn(share: f64) -> bool {
    let lot = getrandom::u32().map(|lot| f64::from(lot) / 2f64.powi(32));
    lot.is_ok_and(|lot| lot < share)
}

/// Rows that were computed again.
struct Recomputed {
    /// The hosts; none for this machine.
    hosts: BTreeSet<NodeId>,
    /// Encoded.
    rows: Vec<u8>,
    /// Receipts of the host, if one host ran all layers. Its stream has ended.
    receipts: Option<Arc<StreamReceipts>>,
}

impl Recomputed {
    /// The host's claim about at least the rows of another claim, with the claims behind it. If the
    /// rows differ, one of the two claims is false. Waits for its receipt.
    async fn proof(&self, about: &Claim) -> Option<SignedClaims> {
        let receipts = self.receipts.as_ref()?;
        receipts_come(Instant::now() + RECEIPT_TIMEOUT, receipts).await;
        let signed = receipts.look(Ledger::take_signed);
        let about = range(about);
        proof(&signed, |claim| {
            let own = range(claim);
            own.start <= about.start && about.end <= own.end
        })
    }
}

/// Positions of the rows that a claim is about.
fn range(claim: &Claim) -> Range<u32> {
    claim.end.saturating_sub(claim.rows)..claim.end
}

/// Ends of the pieces in which an audit sends its first `end` rows. No claim lies in two pieces, so
/// that the auditing host makes a claim about at least the same rows. A piece has at most `most`
/// rows, unless claims overlap or rows without a claim follow, where hosts may cut it again.
fn pieces(claims: &[Claim], most: u32, end: u32) -> Vec<u32> {
    let mut ranges: Vec<Range<u32>> = claims.iter().map(range).collect();
    ranges.retain(|range| range.end <= end);
    ranges.sort_unstable_by_key(|range| (range.start, range.end));
    let (mut ends, mut piece) = (Vec::new(), 0..0);
    for range in ranges {
        if range.start >= piece.end && range.end - piece.start > most && range.start > piece.start {
            ends.push(range.start);
            piece.start = range.start;
        }
        piece.end = piece.end.max(range.end);
    }
    ends.push(end);
    ends
}

/// Number of signed claims.
fn count(signed: &[SignedClaims]) -> usize {
    signed.iter().map(|signed| signed.claims.len()).sum()
}

/// The first claim of which `is` holds, with those behind it of the same receipt.
fn proof(signed: &[SignedClaims], is: impl Fn(&Claim) -> bool) -> Option<SignedClaims> {
    signed.iter().find_map(|signed| {
        let first = signed.claims.iter().position(&is)?;
        signed.from(first)
    })
}

impl Candidate {
    /// Hands the spans to the thread of audits.
    pub(super) fn offer(self) {
        let runtime = self.runtime.clone();
        let _context = runtime.enter();
        #[cfg(feature = "testing")]
        let own = self.settings.audits.clone();
        // In a test, the thread of the process keeps the paused clock of its runtime from advancing.
        // So it starts only if it is used.
        #[cfg(feature = "testing")]
        let queue = match &own {
            Some(own) => &own.queue,
            None => audit_queue::of_process(),
        };
        #[cfg(not(feature = "testing"))]
        let queue = audit_queue::of_process();
        match queue.try_reserve() {
            Ok(place) => place.send(Box::new(|| async move { self.audit().await }.boxed_local())),
            // The queue was closed by its test.
            Err(TrySendError::Closed(())) => {}
            // A full queue means that audits are behind: this call is left out.
            Err(TrySendError::Full(())) => {
                for span in self.spans.iter().filter(|span| self.is_drawn(span)) {
                    let signed = span.receipts.look(Ledger::take_signed);
                    self.not_auditable(span, count(&signed));
                }
            }
        }
    }

    fn is_drawn(&self, span: &AuditSpan) -> bool {
        let share = self.settings.audit_share;
        #[cfg(feature = "testing")]
        if let Some(audits) = &self.settings.audits {
            return span.receipts.is_suspected() || audits.is_drawn(share);
        }
        span.receipts.is_suspected() || is_drawn(share)
    }

    fn health(&self) -> &SharedHealth {
        &self.source.choice().health
    }

    fn model(&self) -> &ModelOnWire {
        &self.source.choice().model
    }

    /// Positions that an audit of a span covers.
    fn most_positions(&self, span: &AuditSpan) -> u32 {
        let encoded = self.input_bytes(span) / self.model().boundary.bytes_per_value();
        let row = encoded * size_of::<f32>();
        u32::try_from(MAX_BYTES / row.max(1)).unwrap_or(u32::MAX)
    }

    /// Bytes of a row that hosts return.
    fn row_bytes(&self) -> usize {
        self.model().bytes_behind()
    }

    /// Bytes of a row that a host of the span receives.
    fn input_bytes(&self, span: &AuditSpan) -> usize {
        self.model().bytes_before(span.layers)
    }

    /// Audits all spans that are drawn. The future runs on a chat loop.
    async fn audit(&self) {
        for span in &self.spans {
            let receipts = &span.receipts;
            receipts_come(self.ended + RECEIPT_TIMEOUT, receipts).await;
            if span.must_sign && receipts.look(|ledger| ledger.owes_receipt()) {
                self.health().failed(&span.host, FailureKind::Unsigned);
            }
            // The draw comes after the receipts: the host cannot know it when it signs.
            if !self.is_drawn(span) {
                continue;
            }
            let signed = span.receipts.look(Ledger::take_signed);
            let most = self.most_positions(span);
            let claims = span.claims(&signed, self.input_bytes(span), most);
            let all = signed.iter().flat_map(|signed| &signed.claims);
            let without_rows = all.filter(|claim| span.rows.is_empty() || claim.end > most);
            self.not_auditable(span, without_rows.count());
            if !claims.is_empty() {
                let until = self.ended + IDLE_TIMEOUT;
                wait(until, || self.health().is_idle()).await;
                self.compare(span, &claims, &signed).await;
            }
        }
    }

    /// Has other hosts compute a span again, and compares the rows.
    async fn compare(&self, span: &AuditSpan, claims: &[Claim], signed: &[SignedClaims]) {
        let last = claims.iter().map(|claim| claim.end).max().unwrap_or(0);
        let host = BTreeSet::from([span.host]);
        let mut asked = host.clone();
        let second = self.recompute(span, claims, last, &mut asked).await;
        let Ok(second) = second.or_else(|_| self.recompute_here(span, last)) else {
            return self.not_auditable(span, claims.len());
        };
        let row_bytes = self.row_bytes();
        let wrong = claims
            .iter()
            .find(|claim| !claim.is_true(&second.rows, row_bytes));
        let Some(claim) = wrong else {
            let confirmed = claims.len() as u64;
            return self.report(&span.host, AuditResult::Confirmed, confirmed);
        };
        let (lo, hi) = span.layers;
        let shown = (span.host.short(), claim.end);
        tracing::warn!(host = %shown.0, lo, hi, end = shown.1, "audit_mismatch: other rows than another host's");
        self.report(&span.host, AuditResult::Mismatch, 1);
        if second.hosts.is_empty() {
            self.accuse(span, claim, signed, &second).await;
            return self.blame(&host, FailureKind::Corruption);
        }
        // This machine decides which of the two is wrong, or else a third host.
        let both = &host | &second.hosts;
        let third = match self.recompute_here(span, claim.end) {
            Ok(third) => Ok(third),
            Err(_) => self.recompute(span, claims, claim.end, &mut asked).await,
        };
        let by = match &third {
            // If several hosts ran the layers of the audit, their claims are about other rows.
            Ok(third) if second.receipts.is_none() && !claim.is_true(&third.rows, row_bytes) => {
                third
            }
            _ => &second,
        };
        self.accuse(span, claim, signed, by).await;
        let end = claim.end as usize * row_bytes;
        let agrees = |third: &Recomputed| third.rows.get(..end) == second.rows.get(..end);
        let of_auditors = match second.hosts.len() {
            1 => FailureKind::Corruption,
            // Any of them may be wrong.
            _ => FailureKind::Disputed,
        };
        match third {
            Ok(third) if agrees(&third) => self.blame(&host, FailureKind::Corruption),
            Ok(third) if claim.is_true(&third.rows, row_bytes) => {
                self.blame(&second.hosts, of_auditors);
            }
            Ok(third) if third.hosts.is_empty() => {
                self.blame(&host, FailureKind::Corruption);
                self.blame(&second.hosts, of_auditors);
            }
            _ => self.blame(&both, FailureKind::Disputed),
        }
    }

    /// Hands over the evidence that a claim contradicts other rows, unless it proves nothing to
    /// others: the rows are of hosts without receipts, or without a claim about all rows of this one.
    async fn accuse(
        &self,
        span: &AuditSpan,
        claim: &Claim,
        signed: &[SignedClaims],
        by: &Recomputed,
    ) {
        let Some(accuse) = self.health().accuse() else {
            return;
        };
        let witness = match by.hosts.is_empty() {
            true => None,
            false => match by.proof(claim).await {
                None => return,
                witness => witness,
            },
        };
        let evidence = || {
            let accused = proof(signed, |one| one == claim)?;
            let row_bytes = u32::try_from(self.input_bytes(span)).ok()?;
            Evidence::new(row_bytes, span.rows.concat(), accused, witness)
        };
        evidence().into_iter().for_each(accuse);
    }

    /// Counts drawn answers that neither a host nor this machine can compute again.
    fn not_auditable(&self, span: &AuditSpan, answers: usize) {
        if answers > 0 {
            self.report(&span.host, AuditResult::NotAuditable, answers as u64);
        }
    }

    fn report(&self, host: &NodeId, result: AuditResult, answers: u64) {
        metrics::counter!("distributed_inference_audits_total", "result" => result.into_str())
            .increment(1);
        self.health()
            .look(|all, now| all.audited(host, result, answers, now));
    }

    fn blame(&self, hosts: &BTreeSet<NodeId>, kind: FailureKind) {
        for host in hosts {
            self.health().failed(host, kind);
        }
    }

    /// The first `end` input rows of a span.
    fn input(&self, span: &AuditSpan, end: u32) -> Result<Vec<f32>, ChatError> {
        let mut encoded = span.rows.concat();
        encoded.truncate(end as usize * self.input_bytes(span));
        let mut values = Vec::new();
        let boundary = self.source.choice().model.boundary;
        let decoded = boundary.decode(&encoded, &mut values);
        decoded.map_err(|e| ChatError::Engine(e.to_string()))?;
        Ok(values)
    }

    /// Runs the first `end` rows of a span through its layers on this machine.
    fn recompute_here(&self, span: &AuditSpan, end: u32) -> Result<Recomputed, ChatError> {
        let none = || ChatError::ShardUnavailable("this machine does not compute layers".into());
        let here = self.here.as_ref().ok_or_else(none)?;
        let (lo, hi) = span.layers;
        let out = here(lo..hi + 1, &self.input(span, end)?)?;
        let mut rows = Vec::new();
        self.source.choice().model.boundary.encode(&out, &mut rows);
        Ok(Recomputed {
            hosts: BTreeSet::new(),
            rows,
            receipts: None,
        })
    }

    /// Runs the first `end` rows of a span through other exact hosts than those in `asked`, and adds
    /// these to it.
    async fn recompute(
        &self,
        span: &AuditSpan,
        claims: &[Claim],
        end: u32,
        asked: &mut BTreeSet<NodeId>,
    ) -> Result<Recomputed, ChatError> {
        for _ in 0..ROUTES {
            if let Some(done) = self.recompute_once(span, claims, end, asked).await? {
                return Ok(done);
            }
        }
        Err(ChatError::ShardUnavailable(
            "no other host finished the audit".into(),
        ))
    }

    /// As [`Self::recompute`] on one route. `None` if its hosts have not returned all rows themselves:
    /// rows of several hosts would be blamed on the last one.
    async fn recompute_once(
        &self,
        span: &AuditSpan,
        claims: &[Claim],
        end: u32,
        asked: &mut BTreeSet<NodeId>,
    ) -> Result<Option<Recomputed>, ChatError> {
        let none = || ChatError::ShardUnavailable("no other hosts can be searched".into());
        let mut inner = self.source.fork().ok_or_else(none)?;
        inner.demand(Exact::Require);
        let (lo, hi) = span.layers;
        let choice = inner.choice();
        let boundary = choice.model.boundary;
        let choice = Choice {
            model: ModelOnWire {
                hosted: lo..hi + 1,
                ..choice.model.clone()
            },
            ..choice.clone()
        };
        let settings = PumpSettings {
            give_up_after: Some(1),
            room_timeout: ROOM_TIMEOUT,
            start_timeout: ROOM_TIMEOUT,
            audit_share: 0.0,
            #[cfg(feature = "testing")]
            watch: None,
            ..self.settings.clone()
        };
        let source = Elsewhere {
            inner,
            choice,
            exclude: asked.clone(),
        };
        let values = self.input(span, end)?;

        let (runtime, cancel) = (self.runtime.clone(), Cancel::default());
        let most = u32::try_from(settings.prefill_rows).unwrap_or(u32::MAX);
        let opened = ShardedBackend::opened(runtime, Box::new(source), settings, &cancel);
        let mut backend = opened.await?;
        let streams = |backend: &ShardedBackend| -> Vec<u64> {
            backend.hops.iter().map(|hop| hop.id).collect()
        };
        let opened = streams(&backend);
        let hosts: BTreeSet<NodeId> = backend.hops.iter().map(Hop::node).collect();
        asked.extend(&hosts);
        let width = values.len() / (end as usize).max(1);
        let mut run = Run {
            cancel: &cancel,
            notify: &mut |_| {},
        };
        let out = async {
            backend.begin_call(end);
            let (mut rest, mut position) = (&values[..], 0);
            for to in pieces(claims, most, end) {
                let piece;
                (piece, rest) = rest.split_at_checked((to - position) as usize * width)?;
                let rows = Rows {
                    all: true,
                    more: end - to,
                    ..Rows::at(position, piece)
                };
                backend.submit(rows, &cancel).await;
                position = to;
            }
            backend.output(&mut run).await.ok()
        };
        let out = out.await;
        // A host may have left without a failure, and others may have taken over.
        let Some(out) = out.filter(|_| streams(&backend) == opened) else {
            return Ok(None);
        };
        let mut rows = Vec::new();
        boundary.encode(&out, &mut rows);
        let receipts = match &backend.hops[..] {
            [only] => only.receipts.clone(),
            _ => None,
        };
        Ok(Some(Recomputed {
            hosts,
            rows,
            receipts,
        }))
    }
}

impl Hop {
    /// Compares rows of a replay, the first of them at `position`, with what the host before returned.
    /// If they differ, either host may be wrong, so both are audited.
    pub(super) fn compare_replay(&self, position: u32, rows: &[u8]) {
        if let Some(before) = &self.replaces
            && !before.compare(position, rows)
            && let Some(own) = &self.receipts
        {
            own.suspect();
        }
    }
}

impl ShardedBackend {
    /// The span of a hop, if its host has answered with rows. `is_over`: its stream ends or rests
    /// now, so that its host signs all answers.
    pub(super) fn audit_span(&self, index: usize, is_over: bool) -> Option<AuditSpan> {
        let hop = self.hops.get(index)?;
        let receipts = hop.receipts.clone()?;
        if !receipts.look(|ledger| ledger.has_claims()) {
            return None;
        }
        let (layers, streams) = ((hop.span.lo, hop.span.hi), self.pipeline.input(index));
        let rows = streams.map(|streams| self.inputs.give_all(&streams, layers));
        Some(AuditSpan {
            host: hop.node(),
            layers,
            rows: rows.unwrap_or_default(),
            receipts,
            must_sign: is_over && !hop.has_failed,
        })
    }

    /// Ends the call, and offers its spans for an audit.
    pub(super) fn offer_audit(&mut self, is_over: bool) {
        if let Some(candidate) = self.candidate(is_over) {
            candidate.offer();
        }
    }

    /// Ends the call. Returns its spans for an audit; `None` if none can be audited.
    pub(super) fn candidate(&mut self, is_over: bool) -> Option<Candidate> {
        self.call.running = None;
        let mut spans = std::mem::take(&mut self.replaced);
        if self.settings.audit_share <= 0.0 {
            return None;
        }
        for hop in &self.hops {
            if hop.span.link.refuses_receipts() {
                self.health.failed(&hop.node(), FailureKind::Unsigned);
            }
        }
        spans.extend((0..self.hops.len()).filter_map(|index| self.audit_span(index, is_over)));
        let source = self.source.as_ref().and_then(|source| source.fork());
        Some(Candidate {
            source: source.filter(|_| !spans.is_empty())?,
            runtime: self.runtime.clone(),
            settings: self.settings.clone(),
            here: self.here.clone(),
            spans,
            ended: Instant::now(),
        })
    }
}

/// Hosts of a source without some of them, all of them exact.
struct Elsewhere {
    inner: Box<dyn HostSource>,
    choice: Choice,
    exclude: BTreeSet<NodeId>,
}

impl HostSource for Elsewhere {
    fn route(&mut self, search: &Search<'_>) -> Result<Vec<RoutedSpan>, ChatError> {
        let route = self.inner.route(&Search {
            layers: search.layers.clone(),
            exclude: &(search.exclude | &self.exclude),
            ..*search
        })?;
        let is_exact = |span: &RoutedSpan| span.link.descriptor.arithmetic == ARITHMETIC;
        match route.iter().all(is_exact) {
            true => Ok(route),
            false => Err(ChatError::ArithmeticMismatch(
                "no other exact host has the layers".into(),
            )),
        }
    }

    fn ready<'a>(&'a mut self, search: &'a Search<'_>) -> LocalBoxFuture<'a, ()> {
        let ready = async move {
            let inner = Search {
                layers: search.layers.clone(),
                exclude: &(search.exclude | &self.exclude),
                ..*search
            };
            self.inner.ready(&inner).await;
        };
        ready.boxed_local()
    }

    fn choice(&self) -> &Choice {
        &self.choice
    }
}
