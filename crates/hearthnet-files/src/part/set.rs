//! Set of piece numbers, and its form in the file `held`.

use std::ops::Range;

use crate::manifest::Digest;

/// First bytes of the file, with the version of the format.
const MAGIC: &[u8; 16] = b"hearthnet held 1";
const DIGEST_BYTES: usize = 32;

/// Piece numbers below a limit.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct PieceSet {
    /// Piece `n` is bit `n % 8` of byte `n / 8`. Bits from `count` on are zero.
    bits: Vec<u8>,
    count: u32,
}

impl PieceSet {
    pub(super) fn none(count: u32) -> Self {
        Self {
            bits: vec![0; count.div_ceil(8) as usize],
            count,
        }
    }

    pub(super) fn contains(&self, piece: u32) -> bool {
        let byte = self.bits.get(piece as usize / 8);
        byte.is_some_and(|byte| byte & (1 << (piece % 8)) != 0)
    }

    pub(super) fn contains_all(&self, pieces: Range<u32>) -> bool {
        pieces.into_iter().all(|piece| self.contains(piece))
    }

    pub(super) fn insert(&mut self, piece: u32) {
        if piece < self.count
            && let Some(byte) = self.bits.get_mut(piece as usize / 8)
        {
            *byte |= 1 << (piece % 8);
        }
    }

    pub(super) fn remove(&mut self, piece: u32) {
        if let Some(byte) = self.bits.get_mut(piece as usize / 8) {
            *byte &= !(1 << (piece % 8));
        }
    }

    pub(super) fn insert_all(&mut self, other: &Self) {
        for (byte, more) in self.bits.iter_mut().zip(&other.bits) {
            *byte |= more;
        }
    }

    pub(super) fn remove_all(&mut self, other: &Self) {
        for (byte, less) in self.bits.iter_mut().zip(&other.bits) {
            *byte &= !less;
        }
    }

    /// Runs of pieces of `within` that are in the set, or that are not.
    pub(super) fn runs(&self, within: Range<u32>, present: bool) -> Vec<Range<u32>> {
        let mut runs: Vec<Range<u32>> = Vec::new();
        let within = within.start..within.end.min(self.count);
        for piece in within.filter(|&piece| self.contains(piece) == present) {
            match runs.last_mut() {
                Some(run) if run.end == piece => run.end = piece + 1,
                _ => runs.push(piece..piece + 1),
            }
        }
        runs
    }

    /// Content of the file: magic, count, bits, SHA-256 of all before.
    pub(super) fn encode(&self) -> Vec<u8> {
        let count = self.count.to_le_bytes();
        let mut bytes = [&MAGIC[..], &count, &self.bits].concat();
        let digest = Digest::of(&bytes);
        bytes.extend(digest.0);
        bytes
    }

    /// Length of the file for `count` pieces.
    pub(super) fn encoded_bytes(count: u32) -> u64 {
        (MAGIC.len() + 4 + DIGEST_BYTES) as u64 + u64::from(count.div_ceil(8))
    }

    /// Reads the file of a model of `count` pieces; `None` if it is damaged.
    pub(super) fn decode(bytes: &[u8], count: u32) -> Option<Self> {
        let (content, digest) = bytes.split_last_chunk::<DIGEST_BYTES>()?;
        let rest = content.strip_prefix(MAGIC)?;
        let bits = rest.strip_prefix(&count.to_le_bytes())?;
        let set = Self {
            bits: bits.to_vec(),
            count,
        };
        let is_whole = Digest::of(content).0 == *digest
            && bits.len() == count.div_ceil(8) as usize
            && (count..count.next_multiple_of(8)).all(|beyond| !set.contains(beyond));
        is_whole.then_some(set)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_are_maximal_and_stay_within_their_limits() {
        let mut set = PieceSet::none(20);
        for piece in [0, 1, 2, 7, 8, 9, 19, 20, 23] {
            set.insert(piece);
        }
        assert_eq!(set.runs(0..99, true), [0..3, 7..10, 19..20]);
        assert_eq!(set.runs(1..8, true), [1..3, 7..8]);
        assert_eq!(set.runs(0..20, false), [3..7, 10..19]);
        set.remove(8);
        assert!(!set.contains_all(7..10) && set.contains_all(0..3));
    }

    #[test]
    fn any_changed_or_missing_byte_of_the_file_is_noticed() {
        for count in [0, 1, 8, 13] {
            let mut set = PieceSet::none(count);
            set.insert(count / 2);
            let bytes = set.encode();
            assert_eq!(bytes.len() as u64, PieceSet::encoded_bytes(count));
            assert_eq!(PieceSet::decode(&bytes, count), Some(set));
            assert_eq!(PieceSet::decode(&bytes, count + 1), None);
            for at in 0..bytes.len() {
                let mut changed = bytes.clone();
                changed[at] ^= 1;
                assert_eq!(PieceSet::decode(&changed, count), None);
                assert_eq!(PieceSet::decode(&bytes[..at], count), None);
            }
        }
    }
}
