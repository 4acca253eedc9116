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
    /// Sources that have the piece.
    sources: u16,
}

/// Whether a source has a piece.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Has {
    No,
    Yes,
    /// It lacks a piece of a run with this one, so this one is asked alone.
    Alone,
    /// It had the piece earlier.
    Gone,
    /// It did not deliver the piece although it offered it.
    Refused,
}

impl Has {
    fn it(self) -> bool {
        matches!(self, Self::Yes | Self::Alone)
    }
}

struct Offer {
    rank: Rank,
    /// Whether sources of higher ranks leave its pieces to it.
    preferred: bool,
    dropped: bool,
    /// Nothing was found for it since the last change.
    dry: bool,
    /// One per slot.
    has: Vec<Has>,
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
                sources: 0,
            })
            .collect();
        let offer = |&rank: &Rank| Offer {
            rank,
            preferred: true,
            dropped: false,
            dry: false,
            has: vec![Has::No; slots.len()],
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
        each.filter(|(slot, has)| !slot.done && !has.it())
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
        for (slot, has) in self.slots.iter_mut().zip(&mut offer.has) {
            let index = slot.piece.index;
            let after = runs.partition_point(|run| run.start <= index);
            let run = after.checked_sub(1).and_then(|before| runs.get(before));
            let offered = run.is_some_and(|run| run.contains(&index));
            let now = match (*has, offered) {
                (Has::No, true) => {
                    grew |= !slot.done;
                    Has::Yes
                }
                (Has::Gone, true) => Has::Yes,
                (Has::Yes | Has::Alone, false) => Has::Gone,
                (same, _) => same,
            };
            change(slot, has, now);
        }
        self.wake();
        grew
    }

    /// Records that a source lacks a piece of a run.
    pub(super) fn refuse(&mut self, source: usize, run: &[usize]) {
        let now = match run.len() {
            1 => Has::Refused,
            _ => Has::Alone,
        };
        if let Some(offer) = self.offers.get_mut(source) {
            for &at in run {
                if let (Some(slot), Some(has)) = (self.slots.get_mut(at), offer.has.get_mut(at)) {
                    change(slot, has, now);
                }
            }
        }
    }

    pub(super) fn drop_source(&mut self, source: usize) {
        if let Some(offer) = self.offers.get_mut(source) {
            for (slot, has) in self.slots.iter_mut().zip(&mut offer.has) {
                change(slot, has, Has::No);
            }
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
        let distance = |at: usize| match at.checked_sub(start) {
            Some(distance) => distance,
            None => at + count - start,
        };
        let found = (0..count)
            .filter_map(|at| Some((self.open(source, at)?.sources, distance(at), at)))
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
            let open = !slot.done && slot.reads == 1 && offer.has.get(at) == Some(&Has::Yes);
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

    /// The slot, if its piece may be asked from the source now.
    fn open(&self, source: usize, at: usize) -> Option<&Slot> {
        let slot = self
            .slots
            .get(at)
            .filter(|slot| slot.reads == 0 && !slot.done)?;
        let offer = self.offers.get(source)?;
        let has = |offer: &Offer| offer.has.get(at).is_some_and(|has| has.it());
        let left_to = |other: &Offer| other.rank < offer.rank && other.preferred && has(other);
        (has(offer) && !self.offers.iter().any(left_to)).then_some(slot)
    }

    /// Whether the piece at `at` can be read together with the one before it.
    fn continues(&self, source: usize, at: usize) -> bool {
        let before = at.checked_sub(1).and_then(|before| self.slots.get(before));
        let (Some(before), Some(slot)) = (before, self.open(source, at)) else {
            return false;
        };
        let end = before
            .piece
            .offset
            .saturating_add(u64::from(before.piece.len));
        let together = |at| {
            let has = self.offers.get(source).and_then(|offer| offer.has.get(at));
            has == Some(&Has::Yes)
        };
        slot.piece.offset.saturating_sub(end) <= MAX_GAP && together(at) && together(at - 1)
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

/// Changes whether a source has a piece, and how many sources have it.
fn change(slot: &mut Slot, has: &mut Has, now: Has) {
    match (has.it(), now.it()) {
        (false, true) => slot.sources = slot.sources.saturating_add(1),
        (true, false) => slot.sources = slot.sources.saturating_sub(1),
        _ => {}
    }
    *has = now;
}
