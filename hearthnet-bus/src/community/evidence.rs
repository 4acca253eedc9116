//! Evidence of a dispute: what hosts signed, and the input rows that it is about
//! (`specs/disputes.md`).
//!
//! Checks all but the computation: signatures, chains and hashes. The judge computes the layers for
//! [`Evidence::rows`], and [`Evidence::finding`] compares.

use serde::{Deserialize, Serialize};
use serde_bytes::{ByteArray, ByteBuf};

use super::log::{Dispute, Finding};
use crate::identity::cbor;
use crate::receipt::{Claim, Hash, Inputs, SignedClaims, Statement};
use crate::{NodeId, SIGNATURE_BYTES};

/// Maximum length of the rows in bytes.
pub const MAX_ROWS_BYTES: usize = 32 << 20;
/// Maximum number of claims of one proof.
pub const MAX_PROOF_CLAIMS: usize = 16_384;

const VERSION: u8 = 1;
/// The map, a proof, its claims, one claim, and one level of room.
const DEPTH: usize = 5;

/// Claims that hosts signed, and the input rows up to the last one in question.
#[derive(Clone, PartialEq, Eq)]
#[allow(clippy::exhaustive_structs)] // Complete by design.
pub struct Evidence {
    /// Length of an input row.
    pub row_bytes: u32,
    /// Input rows from position 0 on.
    pub rows: Vec<u8>,
    /// The first of its claims is the one in question.
    pub accused: SignedClaims,
    /// Another host's claim about the same rows.
    pub witness: Option<SignedClaims>,
}

// Rows are not for logs.
impl std::fmt::Debug for Evidence {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let hosts: Vec<_> = self.proofs().map(|proof| proof.statement.host).collect();
        let bytes = self.rows.len();
        write!(f, "Evidence({bytes} bytes of rows, hosts {hosts:?})")
    }
}

/// Reason why evidence proves nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum EvidenceFault {
    #[error("the evidence cannot be read")]
    Malformed,
    #[error("the evidence is of other parties than the dispute")]
    Parties,
    #[error("the evidence is of other layers, weights, arithmetic or receipts than the dispute")]
    Subject,
    #[error("the signature of a receipt in the evidence is not valid")]
    Signature,
    #[error("the claims in the evidence are not those that its receipt signs")]
    Chain,
    #[error("the rows in the evidence are not those that the claims are about")]
    Rows,
}

impl Evidence {
    /// Evidence of the rows of a stream, as long as the claims need. `None` if it would be too long.
    pub fn new(
        row_bytes: u32,
        mut rows: Vec<u8>,
        accused: SignedClaims,
        witness: Option<SignedClaims>,
    ) -> Option<Self> {
        let mut evidence = Self {
            row_bytes,
            rows: Vec::new(),
            accused,
            witness,
        };
        let length = evidence.length()?;
        if rows.len() < length || length > MAX_ROWS_BYTES {
            return None;
        }
        rows.truncate(length);
        evidence.rows = rows;
        let fits = |proof: &SignedClaims| proof.claims.len() <= MAX_PROOF_CLAIMS;
        let is_bounded = evidence.proofs().all(fits);
        is_bounded.then_some(evidence)
    }

    fn proofs(&self) -> impl Iterator<Item = &SignedClaims> {
        std::iter::once(&self.accused).chain(&self.witness)
    }

    /// Length of the rows that the claims in question need.
    fn length(&self) -> Option<usize> {
        let ends = self.proofs().map(|proof| proof.claims.first());
        let ends: Option<Vec<u32>> = ends.map(|claim| Some(claim?.end)).collect();
        let last = ends?.into_iter().max()? as usize;
        last.checked_mul(self.row_bytes as usize)
    }

    /// Its announcement, once it is sealed.
    pub fn dispute(&self, sealed_hash: Hash, sealed_bytes: u64) -> Dispute {
        let accused = &self.accused.statement;
        Dispute {
            layers: accused.layers,
            accused: accused.host,
            weights: accused.weights,
            witness: self.witness.as_ref().map(|proof| proof.statement.host),
            evidence: sealed_hash,
            receipts: self.proofs().map(SignedClaims::digest).collect(),
            evidence_bytes: sealed_bytes,
        }
    }

    /// Canonical encoding.
    pub fn encode(&self) -> Vec<u8> {
        let record = Record {
            v: VERSION,
            rows: ByteBuf::from(self.rows.clone()),
            accused: (&self.accused).into(),
            witness: self.witness.as_ref().map(Into::into),
            row_bytes: self.row_bytes,
        };
        // Writing integers and bytes to memory cannot fail.
        let encoded = cbor::encode(&record);
        debug_assert!(encoded.is_ok());
        encoded.unwrap_or_default()
    }

    /// Decodes evidence. The caller bounds the length of `bytes`.
    ///
    /// # Errors
    /// [`EvidenceFault::Malformed`].
    pub fn decode(bytes: &[u8]) -> Result<Self, EvidenceFault> {
        let malformed = EvidenceFault::Malformed;
        let record: Record = cbor::decode(bytes, DEPTH).map_err(|_| malformed)?;
        let bounded = |proof: &Proof| (1..=MAX_PROOF_CLAIMS).contains(&proof.1.len());
        let proofs = || std::iter::once(&record.accused).chain(&record.witness);
        let is_bounded = record.rows.len() <= MAX_ROWS_BYTES && record.row_bytes > 0;
        if record.v != VERSION || !is_bounded || !proofs().all(bounded) {
            return Err(malformed);
        }
        Ok(Self {
            row_bytes: record.row_bytes,
            rows: record.rows.into_vec(),
            accused: record.accused.decoded()?,
            witness: record.witness.map(Proof::decoded).transpose()?,
        })
    }

    /// Checks that this is evidence of a dispute, up to the computation.
    ///
    /// # Errors
    /// Its fault: the accusation is false.
    pub fn check(
        &self,
        accuser: &NodeId,
        dispute: &Dispute,
        arithmetic: &str,
    ) -> Result<(), EvidenceFault> {
        if !self
            .proofs()
            .map(|proof| proof.statement.host)
            .eq(dispute.hosts())
        {
            return Err(EvidenceFault::Parties);
        }
        if self.length() != Some(self.rows.len()) || self.row_bytes == 0 {
            return Err(EvidenceFault::Rows);
        }
        let mut inputs = Inputs::default();
        inputs.extend(0, &self.rows, self.row_bytes as usize);
        for (proof, receipt) in self.proofs().zip(&dispute.receipts) {
            let told = &proof.statement;
            if told.caller != *accuser {
                return Err(EvidenceFault::Parties);
            }
            let is_same = told.layers == dispute.layers && told.weights == dispute.weights;
            if !is_same || told.arithmetic != arithmetic || proof.digest() != *receipt {
                return Err(EvidenceFault::Subject);
            }
            let verified = told.verify(&proof.signature);
            verified.map_err(|_| EvidenceFault::Signature)?;
            if proof.chain() != told.chain {
                return Err(EvidenceFault::Chain);
            }
            let claim = proof.claims.first().ok_or(EvidenceFault::Chain)?;
            let is_within = (1..=claim.end).contains(&claim.rows);
            if !is_within || inputs.hash(claim.end) != Some(claim.input) {
                return Err(EvidenceFault::Rows);
            }
        }
        match self.proofs().count() == dispute.receipts.len() {
            true => Ok(()),
            false => Err(EvidenceFault::Subject),
        }
    }

    /// Compares the claims in question with the rows that the layers return for all of
    /// [`Self::rows`], each of `row_bytes` bytes.
    pub fn finding(&self, computed: &[u8], row_bytes: usize) -> Finding {
        let is_false = |proof: &SignedClaims| {
            let claim = proof.claims.first();
            !claim.is_some_and(|claim| claim.is_true(computed, row_bytes))
        };
        let accused = is_false(&self.accused);
        match (accused, self.witness.as_ref().is_some_and(is_false)) {
            (true, true) => Finding::Both,
            (true, false) => Finding::Accused,
            (false, true) => Finding::Witness,
            (false, false) => Finding::None,
        }
    }
}

/// The encoded map, its fields in the order of their encoded keys.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Record {
    v: u8,
    rows: ByteBuf,
    accused: Proof,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    witness: Option<Proof>,
    row_bytes: u32,
}

/// Chain before the claims, the claims, signature, statement.
#[derive(Serialize, Deserialize)]
struct Proof(
    ByteArray<32>,
    Vec<(u32, u32, ByteArray<32>, ByteArray<32>)>,
    ByteArray<SIGNATURE_BYTES>,
    ByteBuf,
);

impl From<&SignedClaims> for Proof {
    fn from(signed: &SignedClaims) -> Self {
        let claim = |claim: &Claim| {
            let Claim {
                end,
                rows,
                input,
                output,
            } = *claim;
            (end, rows, ByteArray::new(input), ByteArray::new(output))
        };
        Self(
            ByteArray::new(signed.before),
            signed.claims.iter().map(claim).collect(),
            ByteArray::new(signed.signature),
            ByteBuf::from(signed.statement.encode()),
        )
    }
}

impl Proof {
    fn decoded(self) -> Result<SignedClaims, EvidenceFault> {
        let Self(before, claims, signature, statement) = self;
        let claim = |(end, rows, input, output): (_, _, ByteArray<32>, ByteArray<32>)| Claim {
            end,
            rows,
            input: input.into_array(),
            output: output.into_array(),
        };
        Ok(SignedClaims {
            statement: Statement::decode(&statement).ok_or(EvidenceFault::Malformed)?,
            signature: signature.into_array(),
            before: before.into_array(),
            claims: claims.into_iter().map(claim).collect(),
        })
    }
}

#[cfg(test)]
#[path = "evidence_tests.rs"]
mod tests;
