//! Missing pieces, what each source has of them, and the choice of the next run of pieces.
//!
//! Rarest first: a source is asked for the pieces that the fewest sources have. Among equally rare
//! ones the choice is random by the node's seed, so that nodes that fetch from one source at the
//! same time begin with different pieces and exchange them.

use std::ops::Range;

use hearthnet_files::part::{PIECE_BYTES, Piece};

use super::source::Rank;

/// Most bytes between two pieces of a run, for the alignment of tensors.
pub(super) const MAX_GAP: u64 = 256;

struct Slot {
    piece: Piece,
    /// Reads in flight.
    reads: u8,
    done: bool,
}

/// Slots of one word of [`Bits`].
const WORD: usize = u64::BITS as usize;

/// Set of slots. A choice looks at all missing pieces, of which a large model has tens of thousands,
/// so it takes 64 of them at a time.
struct Bits(Vec<u64>);

impl Bits {
    fn none(count: usize) -> Self {
        Self(vec![0; count.div_ceil(WORD)])
    }

    fn all(count: usize) -> Self {
        let mut bits = Self::none(count);
        (0..count).for_each(|at| bits.set(at, true));
        bits
    }

    fn has(&self, at: usize) -> bool {
        self.word(at / WORD) >> (at % WORD) & 1 == 1
    }

    fn set(&mut self, at: usize, is_in: bool) {
        if let Some(word) = self.0.get_mut(at / WORD) {
            let bit = 1 << (at % WORD);
            *word = if is_in { *word | bit } else { *word & !bit };
        }
    }

    fn clear(&mut self) {
        self.0.fill(0);
    }

    fn word(&self, word: usize) -> u64 {
        self.0.get(word).copied().unwrap_or_default()
    }
}

struct Offer {
    rank: Rank,
    /// Whether sources of higher ranks leave its pieces to it.
    preferred: bool,
    dropped: bool,
    /// The last search found no piece for it, and nothing has changed since.
    dry: bool,
    /// Slots whose pieces the source has.
    yes: Bits,
    /// Slots of which it has said nothing yet.
    unknown: Bits,
    /// Slots whose pieces it had earlier, or did not deliver.
    gone: Bits,
}

impl Offer {
    fn has(&self, at: usize) -> bool {
        self.yes.has(at)
    }

    /// Slots of a word that sources of higher ranks leave to this one.
    fn claims(&self, word: usize) -> u64 {
        match self.preferred {
            true => self.yes.word(word) | self.unknown.word(word),
            false => 0,
        }
    }
}

pub(super) struct Queue {
    /// In the order of the file.
    slots: Vec<Slot>,
    /// Slots that are not stored, without a read in flight.
    free: Bits,
    offers: Vec<Offer>,
    left: u64,
    total: u64,
    /// Bytes that may still be asked twice.
    spare: u64,
    random: u64,
}

impl Queue {
    pub(super) fn new(mut pieces: Vec<Piece>, sources: &[Rank], seed: u64) -> Self {
        pieces.sort_by_key(|piece| piece.offset);
        let total = pieces.iter().map(|piece| u64::from(piece.len)).sum();
        let slots: Vec<Slot> = pieces
            .into_iter()
            .map(|piece| Slot {
                piece,
                reads: 0,
                done: false,
            })
            .collect();
        let offer = |&rank: &Rank| Offer {
            rank,
            preferred: true,
            dropped: false,
            dry: false,
            yes: Bits::none(slots.len()),
            unknown: Bits::all(slots.len()),
            gone: Bits::none(slots.len()),
        };
        Self {
            offers: sources.iter().map(offer).collect(),
            free: Bits::all(slots.len()),
            slots,
            left: total,
            total,
            spare: (total / 100).max(u64::from(PIECE_BYTES)),
            random: seed,
        }
    }

    /// Bytes of the pieces that are not stored.
    pub(super) fn left(&self) -> u64 {
        self.left
    }

    pub(super) fn total(&self) -> u64 {
        self.total
    }

    pub(super) fn piece(&self, at: usize) -> Option<Piece> {
        self.slots.get(at).map(|slot| slot.piece)
    }

    /// Bytes of missing pieces that the source does not have.
    pub(super) fn lacks(&self, source: usize) -> u64 {
        let Some(offer) = self.offers.get(source) else {
            return self.left;
        };
        let each = self.slots.iter().enumerate();
        each.filter(|(at, slot)| !slot.done && !offer.has(*at))
            .map(|(_, slot)| u64::from(slot.piece.len))
            .sum()
    }

    /// Replaces what a source has. Returns whether it has a missing piece for the first time.
    pub(super) fn offer(&mut self, source: usize, mut runs: Vec<Range<u32>>) -> bool {
        runs.sort_by_key(|run| run.start);
        let Some(offer) = self.offers.get_mut(source).filter(|offer| !offer.dropped) else {
            return false;
        };
        let mut grew = false;
        for (at, slot) in self.slots.iter().enumerate() {
            let index = slot.piece.index;
            let after = runs.partition_point(|run| run.start <= index);
            let run = after.checked_sub(1).and_then(|before| runs.get(before));
            let offered = run.is_some_and(|run| run.contains(&index));
            let had = offer.has(at) || offer.gone.has(at);
            grew |= offered && !slot.done && !had;
            offer.yes.set(at, offered);
            offer.gone.set(at, had && !offered);
        }
        offer.unknown.clear();
        self.wake();
        grew
    }

    /// Records that a source did not deliver these pieces. They may be asked after its next offer.
    pub(super) fn refuse(&mut self, source: usize, run: &[usize]) {
        if let Some(offer) = self.offers.get_mut(source) {
            for &at in run {
                offer.yes.set(at, false);
                offer.unknown.set(at, false);
                offer.gone.set(at, true);
            }
        }
    }

    pub(super) fn drop_source(&mut self, source: usize) {
        if let Some(offer) = self.offers.get_mut(source) {
            [&mut offer.yes, &mut offer.unknown, &mut offer.gone]
                .into_iter()
                .for_each(Bits::clear);
            offer.dropped = true;
        }
        self.wake();
    }

    /// Sets whether sources of higher ranks leave the source's pieces to it.
    pub(super) fn prefer(&mut self, source: usize, preferred: bool) {
        if let Some(offer) = self.offers.get_mut(source)
            && offer.preferred != preferred
        {
            offer.preferred = preferred;
            self.wake();
        }
    }

    /// Returns true if [`Self::take`] gives the source no piece before something changes.
    pub(super) fn is_dry(&self, source: usize) -> bool {
        self.offers.get(source).is_none_or(|offer| offer.dry)
    }

    fn wake(&mut self) {
        self.offers.iter_mut().for_each(|offer| offer.dry = false);
    }

    /// Chooses the next run of at most `most` pieces for a source; empty if it has none.
    pub(super) fn take(&mut self, source: usize, most: usize) -> Vec<usize> {
        if self.is_dry(source) {
            return Vec::new();
        }
        let count = self.slots.len();
        let random = usize::try_from(self.next_random() >> 33).unwrap_or_default();
        let start = random % count.max(1) / most.max(1) * most;
        let Some(first) = self.rarest_from(source, start) else {
            if let Some(offer) = self.offers.get_mut(source) {
                offer.dry = true;
            }
            return Vec::new();
        };
        let mut run = vec![first];
        while run.len() < most && self.continues(source, first + run.len()) {
            run.push(first + run.len());
        }
        self.count_reads(&run);
        run
    }

    /// Chooses pieces that another source has been asked for without an answer, at most once for
    /// each, and in total at most one percent of all bytes.
    pub(super) fn take_again(&mut self, source: usize, slow: &[usize], most: usize) -> Vec<usize> {
        let mut run = Vec::new();
        let Some(offer) = self.offers.get(source) else {
            return run;
        };
        for &at in slow.iter().take(most) {
            let Some(slot) = self.slots.get(at) else {
                break;
            };
            let len = u64::from(slot.piece.len);
            let open = !slot.done && slot.reads == 1 && offer.has(at);
            if !open || len > self.spare || run.last().is_some_and(|last| last + 1 != at) {
                break;
            }
            self.spare -= len;
            run.push(at);
        }
        self.count_reads(&run);
        run
    }

    /// Ends a read of these pieces.
    pub(super) fn put_back(&mut self, run: &[usize]) {
        for &at in run {
            if let Some(slot) = self.slots.get_mut(at) {
                slot.reads = slot.reads.saturating_sub(1);
                self.free.set(at, slot.reads == 0 && !slot.done);
            }
        }
        self.wake();
    }

    pub(super) fn is_done(&self, at: usize) -> bool {
        self.slots.get(at).is_none_or(|slot| slot.done)
    }

    pub(super) fn done(&mut self, at: usize) {
        if let Some(slot) = self.slots.get_mut(at).filter(|slot| !slot.done) {
            slot.done = true;
            self.free.set(at, false);
            self.left = self.left.saturating_sub(u64::from(slot.piece.len));
        }
    }

    /// Slots of a word whose pieces this source may be asked for now.
    fn open(&self, source: usize, word: usize) -> u64 {
        let Some(offer) = self.offers.get(source) else {
            return 0;
        };
        let lower = self.offers.iter().filter(|other| other.rank < offer.rank);
        let claimed = lower.fold(0, |claimed, other| claimed | other.claims(word));
        self.free.word(word) & offer.yes.word(word) & !claimed
    }

    /// The open slot whose piece the fewest sources have: of several, the first from `start` on, and
    /// then from 0 on.
    fn rarest_from(&self, source: usize, start: usize) -> Option<usize> {
        let (words, first) = (self.free.0.len(), start / WORD);
        let after = u64::MAX << (start % WORD);
        let parts = std::iter::once((first, after))
            .chain((first + 1..words).map(|word| (word, u64::MAX)))
            .chain((0..first).map(|word| (word, u64::MAX)))
            .chain(std::iter::once((first, !after)));
        let mut best: Option<(u64, usize)> = None;
        for (word, part) in parts {
            let open = self.open(source, word) & part;
            if open == 0 {
                continue;
            }
            let (sources, rarest) = self.rarest(word, open);
            if best.is_none_or(|(least, _)| sources < least) {
                best = Some((sources, word * WORD + rarest.trailing_zeros() as usize));
            }
            // The source itself has it, so none is rarer.
            if sources == 1 {
                break;
            }
        }
        Some(best?.1)
    }

    /// Of some slots of a word, those whose pieces the fewest sources have; and that number.
    fn rarest(&self, word: usize, of: u64) -> (u64, u64) {
        // Bit i of the number of sources of all 64 slots, lowest bit first.
        let mut planes = [0_u64; 16];
        for offer in &self.offers {
            let mut carry = offer.yes.word(word);
            for plane in &mut planes {
                (*plane, carry) = (*plane ^ carry, *plane & carry);
            }
        }
        let (mut number, mut left) = (0, of);
        for plane in planes.iter().rev() {
            let fewer = left & !plane;
            number = 2 * number + u64::from(fewer == 0);
            left = if fewer == 0 { left } else { fewer };
        }
        (number, left)
    }

    /// Whether the piece at `at` can be read together with the one before it.
    fn continues(&self, source: usize, at: usize) -> bool {
        let before = at.checked_sub(1).and_then(|before| self.piece(before));
        let (Some(before), Some(piece)) = (before, self.piece(at)) else {
            return false;
        };
        let end = before.offset.saturating_add(u64::from(before.len));
        let is_open = self.open(source, at / WORD) >> (at % WORD) & 1 == 1;
        piece.offset.saturating_sub(end) <= MAX_GAP && is_open
    }

    fn count_reads(&mut self, run: &[usize]) {
        for &at in run {
            if let Some(slot) = self.slots.get_mut(at) {
                slot.reads = slot.reads.saturating_add(1);
                self.free.set(at, false);
            }
        }
    }

    /// SplitMix64.
    fn next_random(&mut self) -> u64 {
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.random;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }
}
