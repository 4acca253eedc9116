//! Receipts: what a host received and returned in a stream, signed.
//!
//! `specs/receipts.md` is the normative text. For each answered step that returned rows, both sides
//! make a [`Claim`]: the hash of all input rows of the stream up to its last one, and the hash of the
//! returned rows. The host signs the chain of its claims. So a receipt holds neither rows nor text, and
//! a node with the input rows and the layers can compute whether a claim is true.

use serde::{Deserialize, Serialize};
use serde_bytes::ByteArray;
use sha2::{Digest as _, Sha256};

use crate::identity::cbor;
use crate::{Domain, InvalidSignature, NodeId, NodeKey, SIGNATURE_BYTES};

/// A SHA-256 hash.
pub type Hash = [u8; 32];

/// Value of the statement's field `v`.
const VERSION: u8 = 1;

/// Hashes of the input rows of a stream: at each position, of all rows up to it. 32 bytes for each
/// position, so that a stream can be shortened to any of them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Inputs(Vec<Hash>);

impl Inputs {
    /// Number of positions.
    pub fn length(&self) -> u32 {
        u32::try_from(self.0.len()).unwrap_or(u32::MAX)
    }

    /// Hash of the first `position` rows: 32 zero bytes for none. `None` beyond the end.
    pub fn hash(&self, position: u32) -> Option<Hash> {
        match position.checked_sub(1) {
            None => Some([0; 32]),
            Some(last) => self.0.get(last as usize).copied(),
        }
    }

    /// Drops all positions from `position` on.
    pub fn truncate(&mut self, position: u32) {
        self.0.truncate(position as usize);
    }

    /// The first `position` positions, for a fork.
    #[must_use]
    pub fn fork(&self, position: u32) -> Self {
        let first = self.0.get(..position as usize);
        Self(first.unwrap_or(&self.0).to_vec())
    }

    /// Takes in the rows of a step, each of `row_bytes` bytes, the first of them at `position`.
    /// Returns `false`, and changes nothing, if earlier rows are missing.
    pub fn extend(&mut self, position: u32, rows: &[u8], row_bytes: usize) -> bool {
        let Some(mut hash) = self.hash(position) else {
            return false;
        };
        self.truncate(position);
        for row in rows.chunks_exact(row_bytes.max(1)) {
            hash = Sha256::new()
                .chain_update(hash)
                .chain_update(row)
                .finalize()
                .into();
            self.0.push(hash);
        }
        true
    }
}

/// Answer of a host to one step, as hashes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(clippy::exhaustive_structs)] // Complete by design.
pub struct Claim {
    /// Position behind the last row of the step.
    pub end: u32,
    /// Number of rows returned, the last ones of the step; at least 1.
    pub rows: u32,
    /// Hash of the `end` input rows of the stream.
    pub input: Hash,
    /// Hash of the returned rows.
    pub output: Hash,
}

impl Claim {
    /// Claim for a step that ends the stream's `inputs`. `None` if it returned no rows.
    pub fn new(inputs: &Inputs, rows: u32, returned: &[u8]) -> Option<Self> {
        let end = inputs.length();
        (rows > 0).then_some(Self {
            end,
            rows,
            input: inputs.hash(end)?,
            output: Sha256::digest(returned).into(),
        })
    }

    /// Returns whether these are the returned rows.
    pub fn returned(&self, rows: &[u8]) -> bool {
        self.output[..] == Sha256::digest(rows)[..]
    }

    /// Returns whether these rows, from position 0 on, are what the host returned.
    pub fn is_true(&self, rows: &[u8], row_bytes: usize) -> bool {
        let at = |position: u32| (position as usize).checked_mul(row_bytes);
        let range = || Some(at(self.end.checked_sub(self.rows)?)?..at(self.end)?);
        let rows = range().and_then(|range| rows.get(range));
        rows.is_some_and(|rows| self.returned(rows))
    }

    /// The chain with this claim. The chain of no claims is 32 zero bytes.
    #[must_use]
    pub fn after(&self, chain: Hash) -> Hash {
        let chained = Sha256::new()
            .chain_update(chain)
            .chain_update(self.end.to_be_bytes())
            .chain_update(self.rows.to_be_bytes())
            .chain_update(self.input)
            .chain_update(self.output);
        chained.finalize().into()
    }
}

/// Content of a receipt that its signature covers.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(clippy::exhaustive_structs)] // Complete by design.
pub struct Statement {
    /// Node that signs.
    pub host: NodeId,
    pub caller: NodeId,
    /// Identity of the model's weights.
    pub weights: [u8; 32],
    /// First and last layer, both inclusive.
    pub layers: (u32, u32),
    /// Arithmetic of the host.
    pub arithmetic: String,
    pub stream: u32,
    pub epoch: u32,
    /// Number of claims.
    pub claims: u32,
    /// Chain over these claims.
    pub chain: Hash,
}

impl Statement {
    /// Signs the statement, which must be of the key's own node.
    pub fn sign(&self, key: &NodeKey) -> [u8; SIGNATURE_BYTES] {
        key.sign(Domain::Receipt, &self.encode())
    }

    /// Checks the signature of [`Statement::host`].
    ///
    /// # Errors
    /// [`InvalidSignature`].
    pub fn verify(&self, signature: &[u8; SIGNATURE_BYTES]) -> Result<(), InvalidSignature> {
        Domain::Receipt.verify(&self.host, &self.encode(), signature)
    }

    /// Reads a canonical encoding. Its keys are not checked.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let body: Body = cbor::decode(bytes, 2).ok()?;
        let key = |key: ByteArray<32>| NodeId::from_checked(key.into_array());
        (body.v == VERSION).then(|| Self {
            host: key(body.host),
            caller: key(body.caller),
            weights: body.weights.into_array(),
            layers: body.layers,
            arithmetic: body.arithmetic,
            stream: body.stream,
            epoch: body.epoch,
            claims: body.claims,
            chain: body.chain.into_array(),
        })
    }

    /// Canonical encoding.
    pub fn encode(&self) -> Vec<u8> {
        let key = |node: NodeId| ByteArray::new(*node.as_bytes());
        let body = Body {
            v: VERSION,
            host: key(self.host),
            chain: ByteArray::new(self.chain),
            epoch: self.epoch,
            caller: key(self.caller),
            claims: self.claims,
            layers: self.layers,
            stream: self.stream,
            weights: ByteArray::new(self.weights),
            arithmetic: self.arithmetic.clone(),
        };
        // Writing integers, bytes and text to memory cannot fail.
        let encoded = cbor::encode(&body);
        debug_assert!(encoded.is_ok());
        encoded.unwrap_or_default()
    }
}

/// The signed map, its fields in the order of their encoded keys.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Body {
    v: u8,
    host: ByteArray<32>,
    chain: ByteArray<32>,
    epoch: u32,
    caller: ByteArray<32>,
    claims: u32,
    layers: (u32, u32),
    stream: u32,
    weights: ByteArray<32>,
    arithmetic: String,
}

/// Claims that a host has signed.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(clippy::exhaustive_structs)] // Complete by design.
pub struct SignedClaims {
    /// With all claims of the stream up to the last one here.
    pub statement: Statement,
    pub signature: [u8; SIGNATURE_BYTES],
    /// Chain before the first of `claims`.
    pub before: Hash,
    pub claims: Vec<Claim>,
}

impl SignedClaims {
    /// The chain with all claims.
    pub fn chain(&self) -> Hash {
        chained(self.before, &self.claims)
    }

    /// The same without the claims before `first`, an index. `None` beyond the end.
    #[must_use]
    pub fn from(&self, first: usize) -> Option<Self> {
        let (before, claims) = self.claims.split_at_checked(first)?;
        (!claims.is_empty()).then(|| Self {
            before: chained(self.before, before),
            claims: claims.to_vec(),
            ..self.clone()
        })
    }

    /// SHA-256 of the statement and its signature.
    pub fn digest(&self) -> Hash {
        let digest = Sha256::new().chain_update(self.statement.encode());
        digest.chain_update(self.signature).finalize().into()
    }
}

fn chained(before: Hash, claims: &[Claim]) -> Hash {
    claims
        .iter()
        .fold(before, |chain, claim| claim.after(chain))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::testing::{id, key};

    const ROW: usize = 4;

    fn statement() -> Statement {
        Statement {
            host: id(1),
            caller: id(2),
            weights: [6; 32],
            layers: (2, 5),
            arithmetic: "canonical-1".into(),
            stream: 7,
            epoch: 0,
            claims: 64,
            chain: [5; 32],
        }
    }

    /// Inputs of some rows that were taken in one by one.
    fn one_by_one(rows: &[[u8; ROW]]) -> Inputs {
        let mut inputs = Inputs::default();
        for (position, row) in (0..).zip(rows) {
            assert!(inputs.extend(position, row, ROW));
        }
        inputs
    }

    #[test]
    fn the_statement_is_canonical_and_binds_every_field() {
        let told = statement();
        assert!(cbor::is_in_order(&told.encode()));
        let signature = told.sign(&key(1));
        assert_eq!(told.verify(&signature), Ok(()));
        let changes: [fn(&mut Statement); 9] = [
            |s| s.host = id(3),
            |s| s.caller = id(3),
            |s| s.weights[0] ^= 1,
            |s| s.layers.0 += 1,
            |s| s.arithmetic.push('x'),
            |s| s.stream += 1,
            |s| s.epoch += 1,
            |s| s.claims += 1,
            |s| s.chain[31] ^= 1,
        ];
        for change in changes {
            let mut other = told.clone();
            change(&mut other);
            assert_eq!(other.verify(&signature), Err(InvalidSignature), "{other:?}");
        }
    }

    #[test]
    fn a_claim_says_which_rows_came_after_which() {
        let rows = [[1; ROW], [2; ROW], [3; ROW]];
        let claim = |rows: &[[u8; ROW]], returned: &[u8]| {
            Claim::new(&one_by_one(rows), 1, returned).unwrap()
        };
        let told = claim(&rows, &[9; ROW]);
        assert_eq!((told.end, told.rows), (3, 1));
        let [a, b, c] = rows;
        for other in [claim(&[b, a, c], &[9; ROW]), claim(&[b, c], &[9; ROW])] {
            assert_ne!(other.input, told.input);
        }
        assert_ne!(claim(&rows, &[8; ROW]).output, told.output);
        assert_eq!(Claim::new(&one_by_one(&rows), 0, &[]), None);
        // The order of claims is part of the chain.
        let (one, two) = (told, claim(&rows[..2], &[9; ROW]));
        assert_ne!(two.after(one.after([0; 32])), one.after(two.after([0; 32])));
    }

    #[test]
    fn rows_beyond_a_gap_are_not_taken_in() {
        let mut inputs = one_by_one(&[[1; ROW]]);
        assert!(!inputs.extend(2, &[3; ROW], ROW));
        assert_eq!(inputs, one_by_one(&[[1; ROW]]));
        assert_eq!(inputs.hash(2), None);
    }

    proptest! {
        /// Steps of any length, repeated, cut off and forked, hash to what one step of the rows does.
        #[test]
        fn inputs_depend_on_the_rows_only(
            rows in proptest::collection::vec(any::<[u8; ROW]>(), 1..40),
            steps in proptest::collection::vec((0usize..40, 1usize..9), 0..30),
        ) {
            let mut inputs = Inputs::default();
            for (from, count) in steps {
                let from = from.min(inputs.length() as usize).min(rows.len() - 1);
                let to = (from + count).min(rows.len());
                prop_assert!(inputs.extend(from as u32, rows[from..to].as_flattened(), ROW));
            }
            let held = inputs.length() as usize;
            prop_assert_eq!(&inputs, &one_by_one(&rows[..held]));
            let half = held / 2;
            prop_assert_eq!(inputs.fork(half as u32), one_by_one(&rows[..half]));
            inputs.truncate(half as u32);
            prop_assert_eq!(inputs, one_by_one(&rows[..half]));
        }
    }
}
