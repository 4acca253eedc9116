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

/// Availability of a piece at a source.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Has {
    /// The source has not answered.
    Unknown,
    No,
    Yes,
    /// It had the piece earlier, or did not deliver it.
    Gone,
}

struct Offer {
    rank: Rank,
    /// Whether sources of higher ranks leave its pieces to it.
    preferred: bool,
    dropped: bool,
    /// Nothing was found for it since the last change.
    dry: bool,
    /// Availability at each slot.
    has: Vec<Has>,
}

impl Offer {
    fn has(&self, at: usize) -> bool {
        self.has.get(at) == Some(&Has::Yes)
    }

    /// Whether a source of a higher rank leaves the piece to this one.
    fn claims(&self, at: usize) -> bool {
        self.preferred && matches!(self.has.get(at), Some(Has::Yes | Has::Unknown))
    }
}

pub(super) struct Queue {
    /// In the order of the file.
    slots: Vec<Slot>,
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
            has: vec![Has::Unknown; slots.len()],
        };
        Self {
            offers: sources.iter().map(offer).collect(),
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
        let each = self.slots.iter().zip(&offer.has);
        each.filter(|(slot, has)| !slot.done && **has != Has::Yes)
            .map(|(slot, _)| u64::from(slot.piece.len))
            .sum()
    }

    /// Replaces what a source has. Returns whether it has a missing piece for the first time.
    pub(super) fn offer(&mut self, source: usize, mut runs: Vec<Range<u32>>) -> bool {
        runs.sort_by_key(|run| run.start);
        let Some(offer) = self.offers.get_mut(source).filter(|offer| !offer.dropped) else {
            return false;
        };
        let mut grew = false;
        for (slot, has) in self.slots.iter().zip(&mut offer.has) {
            let index = slot.piece.index;
            let after = runs.partition_point(|run| run.start <= index);
            let run = after.checked_sub(1).and_then(|before| runs.get(before));
            let offered = run.is_some_and(|run| run.contains(&index));
            grew |= offered && !slot.done && matches!(has, Has::Unknown | Has::No);
            *has = match (*has, offered) {
                (_, true) => Has::Yes,
                (Has::Yes | Has::Gone, false) => Has::Gone,
                (Has::Unknown | Has::No, false) => Has::No,
            };
        }
        self.wake();
        grew
    }

    /// Records that a source did not deliver these pieces. They may be asked after its next offer.
    pub(super) fn refuse(&mut self, source: usize, run: &[usize]) {
        if let Some(offer) = self.offers.get_mut(source) {
            for &at in run {
                if let Some(has) = offer.has.get_mut(at) {
                    *has = Has::Gone;
                }
            }
        }
    }

    pub(super) fn drop_source(&mut self, source: usize) {
        if let Some(offer) = self.offers.get_mut(source) {
            offer.has.fill(Has::No);
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

    /// Nothing can be taken by the source until something changes.
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
        let distance = |at: usize| (at + count - start) % count;
        let found = (0..count)
            .filter_map(|at| Some((self.open(source, at)?, distance(at), at)))
            .min();
        let Some((_, _, first)) = found else {
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
            self.left = self.left.saturating_sub(u64::from(slot.piece.len));
        }
    }

    /// Number of sources that have the piece, if it may be asked from this one now.
    fn open(&self, source: usize, at: usize) -> Option<usize> {
        let slot = self.slots.get(at)?;
        let offer = self.offers.get(source)?;
        let left_to = |other: &Offer| other.rank < offer.rank && other.claims(at);
        let free = slot.reads == 0 && !slot.done && offer.has(at);
        let open = free && !self.offers.iter().any(left_to);
        open.then(|| self.offers.iter().filter(|offer| offer.has(at)).count())
    }

    /// Whether the piece at `at` can be read together with the one before it.
    fn continues(&self, source: usize, at: usize) -> bool {
        let before = at.checked_sub(1).and_then(|before| self.piece(before));
        let (Some(before), Some(piece)) = (before, self.piece(at)) else {
            return false;
        };
        let end = before.offset.saturating_add(u64::from(before.len));
        piece.offset.saturating_sub(end) <= MAX_GAP && self.open(source, at).is_some()
    }

    fn count_reads(&mut self, run: &[usize]) {
        for &at in run {
            if let Some(slot) = self.slots.get_mut(at) {
                slot.reads = slot.reads.saturating_add(1);
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
