//! Receipts: what this host received and returned in its streams, signed (`specs/receipts.md`).
//!
//! The compute thread hashes rows after it has sent the answers. Signatures are made on a thread of
//! their own.

use std::sync::{Arc, mpsc};
use std::{io, thread};

use bytes::Bytes;
use hearthnet_bus::SIGNATURE_BYTES;
use hearthnet_bus::receipt::{Claim, Inputs, Statement};
use hearthnet_engine::ARITHMETIC;
use hearthnet_platform::machine::stand_back;
use hearthnet_transport::{Message, NodeId, Receipt};

use crate::engine::Served;
use crate::stream_handle::{ResponseSink, StreamHandle};

/// Signs with the key of the host's node. `None` if the node has ended.
pub(crate) type Sign = Box<dyn Fn(&Statement) -> Option<[u8; SIGNATURE_BYTES]> + Send>;

/// A receipt to sign, and the session that gets it.
struct Draft {
    statement: Statement,
    sink: Arc<dyn ResponseSink>,
}

impl Draft {
    fn send(self, sign: &Sign) {
        let Statement {
            stream,
            epoch,
            claims,
            chain,
            ..
        } = self.statement;
        let signature = sign(&self.statement);
        if let (Some(claims), Some(signature)) = (claims.try_into().ok(), signature) {
            self.sink.send(Message::Receipt(Receipt {
                stream,
                epoch,
                claims,
                chain,
                signature,
            }));
        }
    }
}

/// Sends the receipts of a host.
pub(crate) struct Notary {
    host: NodeId,
    pass_on: Box<dyn Fn(Draft) + Send>,
}

impl Notary {
    /// Starts a thread that signs. It ends when the notary is dropped. At most one receipt of a
    /// stream waits for each of its intervals, so the queue is bounded by the streams and their rows.
    ///
    /// # Errors
    /// If the system cannot create a thread.
    pub(crate) fn start(host: NodeId, sign: Sign, niceness: i32) -> io::Result<Self> {
        let (drafts, waiting) = mpsc::channel::<Draft>();
        thread::Builder::new()
            .name("shard-receipts".into())
            .spawn(move || {
                stand_back(niceness);
                waiting.into_iter().for_each(|draft| draft.send(&sign));
            })?;
        let pass_on = Box::new(move |draft| {
            // A failed send means that the thread has died, which only a defect can cause. The host
            // is not auditable then.
            let _ = drafts.send(draft);
        });
        Ok(Self { host, pass_on })
    }

    /// Signs on the calling thread, as in a simulation.
    pub(crate) fn here(host: NodeId, sign: Sign) -> Self {
        let pass_on = Box::new(move |draft: Draft| draft.send(&sign));
        Self { host, pass_on }
    }

    /// Claims of a new stream; `None` if its session has no receipts, or the arithmetic is not exact.
    pub(crate) fn claims(&self, handle: &StreamHandle, served: &Served) -> Option<StreamClaims> {
        let interval = handle.caller.receipts;
        (interval > 0 && served.arithmetic == ARITHMETIC).then(|| StreamClaims {
            statement: Statement {
                host: self.host,
                caller: handle.caller.node,
                weights: served.weights,
                layers: handle.layers,
                arithmetic: served.arithmetic.clone(),
                stream: handle.name.stream,
                epoch: handle.name.epoch,
                claims: 0,
                chain: [0; 32],
            },
            interval,
            inputs: Inputs::default(),
            signed: 0,
            rows: 0,
            rests: false,
        })
    }

    /// Sends a receipt if one is due. `ends`: the stream has ended.
    pub(crate) fn certify(
        &self,
        claims: &mut StreamClaims,
        sink: &Arc<dyn ResponseSink>,
        ends: bool,
    ) {
        let is_due = ends || claims.rests || claims.rows >= claims.interval;
        if !is_due {
            return;
        }
        (claims.rests, claims.rows) = (false, 0);
        if claims.signed == claims.statement.claims {
            return;
        }
        claims.signed = claims.statement.claims;
        (self.pass_on)(Draft {
            statement: claims.statement.clone(),
            sink: Arc::clone(sink),
        });
    }
}

/// Rows of an answered step, for its claim.
pub(crate) struct AnsweredRows {
    pub(crate) position: u32,
    pub(crate) received: Bytes,
    /// Number of returned rows.
    pub(crate) rows: u32,
    pub(crate) returned: Bytes,
}

/// Claims of one stream epoch.
pub(crate) struct StreamClaims {
    /// With all claims so far.
    statement: Statement,
    /// Positions between two receipts.
    interval: u32,
    inputs: Inputs,
    /// Number of claims in the last receipt.
    signed: u32,
    /// Rows received since the last receipt.
    rows: u32,
    /// The stream rests: a receipt is due.
    rests: bool,
}

impl StreamClaims {
    /// Begins with the rows of another stream.
    pub(crate) fn fork_of(&mut self, source: &Self, position: u32) {
        self.inputs = source.inputs.fork(position);
    }

    /// The caller has shortened the stream. `rests`: it needs nothing for now.
    pub(crate) fn shorten(&mut self, position: u32, rests: bool) {
        self.inputs.truncate(position);
        self.rests |= rests;
    }

    /// Takes in an answered step.
    pub(crate) fn answered(&mut self, step: &AnsweredRows, row_bytes: usize) {
        let before = step.position;
        // The scheduler has checked that no rows are missing.
        self.inputs.extend(before, &step.received, row_bytes);
        self.rows = self
            .rows
            .saturating_add(self.inputs.length().saturating_sub(before));
        if let Some(claim) = Claim::new(&self.inputs, step.rows, &step.returned) {
            let statement = &mut self.statement;
            statement.chain = claim.after(statement.chain);
            statement.claims = statement.claims.saturating_add(1);
        }
    }
}
