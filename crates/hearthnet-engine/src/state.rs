//! States of recurrent layers, and checkpoints of them.
//!
//! A state has a fixed size, is overwritten by every row, and cannot be cut back by position. So a
//! sequence keeps several: the newest one, the one before the last batch, and a few *checkpoints*.
//! Going back to any other position ends at the last checkpoint before it; the rows in between have
//! to be appended again.
//!
//! ```text
//! positions 0      512                  1984  2048          2133  2134
//!           |      [checkpoint]         [checkpoint, twice] |     [newest]
//!           |                                               [before the last batch]
//! ```
//!
//! A batch reads one buffer and writes another, so that a batch that fails changes nothing.
//! Checkpoints are never written again, so forks share them, and everything else until they append.
//!
//! # Places of checkpoints
//! Checkpoints lie at multiples of [`INTERVAL`] positions. [`place`] decides which of them are kept.
//! It goes through all multiples one by one, so that the result does not depend on batches:
//!
//! - The newest two are kept, so a short step back costs less than two intervals.
//! - Of the others, the one that is nearest to its predecessor goes: what it saves is cheapest to
//!   compute again. A single prompt keeps one at about the half or later.
//! - The last but one of a prompt is marked when short batches follow, and unmarked ones go before
//!   it. So it stays at least until as many positions have followed as lie before it. The next
//!   prompt of a conversation often differs from the text so far after the last prompt, or shortly
//!   before its end: chat templates drop thoughts, and end a prompt with a header that is written in
//!   another way when it is followed by an answer.

use zeroize::Zeroize;

use crate::error::EngineError;
use crate::kernels::SharedMut;
use crate::pool::{Pool, PoolMemory};

/// States of a sequence during a batch. `None` are zeros.
pub(crate) struct SequenceState<'a> {
    /// Position of the first row of the batch.
    pub(crate) begin: usize,
    /// Before the first row of the batch.
    pub(crate) before: Option<SharedMut<'a, f32>>,
    /// After its last row.
    pub(crate) after: SharedMut<'a, f32>,
    /// Copies to be made on the way: after how many positions, and where.
    pub(crate) checkpoints: Vec<(usize, SharedMut<'a, f32>)>,
}

/// Distance of the places of checkpoints, in positions. Copying a state takes less than a hundredth
/// of the time of so many rows.
pub(crate) const INTERVAL: usize = 64;
/// Number of checkpoints of a sequence. They take most of the memory of its states.
const CHECKPOINTS: usize = 3;
/// Maximum rows of a batch that goes on with an answer: one row, or some speculated tokens. More
/// rows are a prompt.
const SHORT: u32 = 8;

/// State of a sequence after so many positions.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct At {
    length: u32,
    buffer: usize,
}

/// Checkpoint, or the place of one.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Place {
    length: u32,
    /// Near the end of a prompt.
    turn: bool,
    /// `None` until it has one.
    buffer: Option<usize>,
}

/// States of one sequence. Without positions there are none.
#[derive(Default)]
pub struct Track {
    newest: Option<At>,
    /// Before the last batch.
    before: Option<At>,
    /// In ascending order.
    checkpoints: Vec<Place>,
    /// The last batch was a part of a prompt.
    prompt: bool,
}

/// States in this machine's memory.
pub struct HostStates {
    /// Values of a state.
    values: usize,
    states: Vec<Vec<f32>>,
}

impl HostStates {
    pub(crate) fn new(values: usize) -> Self {
        Self {
            values,
            states: Vec::new(),
        }
    }
}

impl PoolMemory for HostStates {
    fn is_empty(&self) -> bool {
        self.values == 0
    }

    fn add(&mut self) -> Result<(), EngineError> {
        let mut state = Vec::new();
        let refused = |_| EngineError::OutOfMemory(4 * self.values as u64);
        state.try_reserve_exact(self.values).map_err(refused)?;
        state.resize(self.values, 0.0);
        self.states.push(state);
        Ok(())
    }

    fn clear(&mut self, states: &[usize]) {
        for &state in states {
            self.states[state].fill(0.0);
        }
    }
}

impl Drop for HostStates {
    fn drop(&mut self) {
        self.states.iter_mut().for_each(|state| state.zeroize());
    }
}

/// Maximum bytes of the states of a sequence, each of so many values.
pub(crate) fn bytes_per_sequence(values: u64) -> u64 {
    values.saturating_mul(4 * (CHECKPOINTS as u64 + 2))
}

/// States of all sequences.
pub(crate) struct States<M> {
    pool: Pool<M>,
}

impl<M: PoolMemory> States<M> {
    pub(crate) fn new(memory: M) -> Self {
        Self {
            pool: Pool::new(memory),
        }
    }

    pub(crate) fn memory(&self) -> &M {
        &self.pool.memory
    }

    /// Gives up a state. Returns it if nothing else holds it: it may be overwritten.
    fn reuse(&mut self, buffer: usize) -> Option<usize> {
        if !self.pool.is_shared(buffer) {
            return Some(buffer);
        }
        self.pool.release(buffer);
        None
    }

    /// A copy, which shares all states.
    pub(crate) fn fork(&mut self, track: &Track) -> Track {
        self.pool.share(track.buffers());
        Track {
            checkpoints: track.checkpoints.clone(),
            ..*track
        }
    }

    /// Makes room for the states of a batch that takes a sequence from `len` to `end` positions.
    ///
    /// # Errors
    /// As for [`PoolMemory::add`].
    pub(crate) fn grow(
        &mut self,
        track: &mut Track,
        len: u32,
        end: u32,
    ) -> Result<(), EngineError> {
        if self.pool.memory.is_empty() {
            return Ok(());
        }
        let mut spare = Vec::new();
        if let Some(before) = track.before.take() {
            spare.extend(self.reuse(before.buffer));
        }
        let old = track.checkpoints.clone();
        place(&mut track.checkpoints, track.prompt, len, end);
        for gone in old.iter().filter(|old| {
            let mut kept = track.checkpoints.iter();
            !kept.any(|kept| kept.length == old.length)
        }) {
            spare.extend(gone.buffer.and_then(|buffer| self.reuse(buffer)));
        }
        track.prompt = end - len > SHORT;
        track.before = track.newest.take();
        let mut next = |states: &mut Self| match spare.pop() {
            Some(buffer) => Ok(buffer),
            None => states.pool.take(),
        };
        // From here on, the track holds every buffer that it takes, also after an error.
        let newest = next(self);
        if let Ok(buffer) = newest {
            let length = end;
            track.newest = Some(At { length, buffer });
        }
        let mut result = newest.map(drop);
        for place in &mut track.checkpoints {
            if place.buffer.is_none() && result.is_ok() {
                match next(self) {
                    Ok(buffer) => place.buffer = Some(buffer),
                    Err(error) => result = Err(error),
                }
            }
        }
        track.checkpoints.retain(|place| place.buffer.is_some());
        self.pool.free(spare);
        result
    }

    /// Goes back to `len` positions, or to an earlier state. Returns its length.
    pub(crate) fn shrink(&mut self, track: &mut Track, len: u32) -> u32 {
        if self.pool.memory.is_empty() {
            return len;
        }
        let is_there = |at: &Option<At>| at.is_some_and(|at| at.length == len);
        if !is_there(&track.newest) {
            let newest = track.newest.take();
            let before = track.before.take();
            if is_there(&before) {
                track.newest = before;
            } else {
                self.pool.free(before.map(|at| at.buffer));
                let mut earlier = track.checkpoints.iter().rev();
                let last = earlier.find(|place| place.length <= len);
                track.newest = last.and_then(|place| {
                    let (length, buffer) = (place.length, place.buffer?);
                    Some(At { length, buffer })
                });
                self.pool.share(track.newest.map(|at| at.buffer));
            }
            self.pool.free(newest.map(|at| at.buffer));
        }
        let kept = track.newest.map_or(0, |at| at.length);
        let later = track.checkpoints.partition_point(|at| at.length <= kept);
        let later = track.checkpoints.split_off(later);
        self.pool
            .free(later.into_iter().filter_map(|place| place.buffer));
        kept
    }

    /// Frees the states that only this sequence holds.
    pub(crate) fn close(&mut self, track: &Track) {
        self.pool.free(track.buffers());
    }
}

impl States<HostStates> {
    /// Views of all states, shared between the threads of a batch.
    pub(crate) fn views(&mut self) -> Vec<SharedMut<'_, f32>> {
        let states = self.pool.memory.states.iter_mut();
        states.map(|state| SharedMut::new(state)).collect()
    }
}

/// Buffers that a batch reads and writes: the state before it if there is one, the one after it, and
/// those of checkpoints on the way, with their lengths.
#[derive(Clone, Debug)]
pub struct StateBuffers {
    pub before: Option<usize>,
    pub after: usize,
    /// In ascending order of the lengths.
    pub checkpoints: Vec<(u32, usize)>,
}

impl Track {
    fn buffers(&self) -> impl Iterator<Item = usize> {
        let newest = [self.newest, self.before].into_iter().flatten();
        let checkpoints = self.checkpoints.iter().filter_map(|place| place.buffer);
        newest.map(|at| at.buffer).chain(checkpoints)
    }

    /// Buffers of a batch from `len` positions on, after [`Storage::grow`](crate::Storage::grow).
    /// `None` if no layer has a state.
    pub fn batch(&self, len: u32) -> Option<StateBuffers> {
        let new = self.checkpoints.iter().filter(|place| place.length > len);
        Some(StateBuffers {
            before: self.before.map(|at| at.buffer),
            after: self.newest?.buffer,
            checkpoints: new
                .filter_map(|place| Some((place.length, place.buffer?)))
                .collect(),
        })
    }
}

/// Updates the places of checkpoints when a batch takes a sequence from `len` to `end` positions.
/// `prompt` tells whether the batch before was a part of a prompt.
fn place(places: &mut Vec<Place>, prompt: bool, len: u32, end: u32) {
    if prompt && end - len <= SHORT {
        let last_but_one = places.len().saturating_sub(2);
        if let Some(place) = places.get_mut(last_but_one) {
            place.turn = true;
        }
    }
    let interval = INTERVAL as u32;
    for multiple in len / interval + 1..=end / interval {
        if places.len() == CHECKPOINTS {
            places.remove(victim(places));
        }
        places.push(Place {
            length: multiple * interval,
            turn: false,
            buffer: None,
        });
    }
}

/// Index of the place to give up for a further one. The newest is kept.
fn victim(places: &[Place]) -> usize {
    let distance = |index: usize| {
        let previous = index
            .checked_sub(1)
            .map_or(0, |before| places[before].length);
        places[index].length - previous
    };
    let others = 0..places.len().saturating_sub(1);
    let first = others.min_by_key(|&index| (places[index].turn, distance(index)));
    first.unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lengths(places: &[Place]) -> Vec<u32> {
        places.iter().map(|place| place.length).collect()
    }

    /// Places after batches that end at these lengths.
    fn placed(ends: &[u32]) -> Vec<Place> {
        let (mut places, mut prompt, mut len) = (Vec::new(), false, 0);
        for &end in ends {
            place(&mut places, prompt, len, end);
            prompt = end - len > SHORT;
            len = end;
        }
        places
    }

    #[test]
    fn places_of_a_prompt_do_not_depend_on_its_chunks() {
        for end in [1, 63, 64, 65, 200, 1000, 5000, 20_011] {
            let whole = placed(&[end]);
            for chunk in [9, 50, 64, 512, 700] {
                let mut ends: Vec<u32> = (1..=end / chunk).map(|nth| nth * chunk).collect();
                // The rest is too short to count as a part of the prompt.
                ends.extend((!end.is_multiple_of(chunk) && end % chunk > SHORT).then_some(end));
                let last = ends.last().copied().unwrap_or(0);
                let expected = if last == end {
                    &whole
                } else {
                    &placed(&[last])
                };
                assert_eq!(lengths(&placed(&ends)), lengths(expected), "{end}, {chunk}");
            }
        }
        assert!(placed(&[63]).is_empty());
        assert_eq!(lengths(&placed(&[300])), [128, 192, 256]);
    }

    #[test]
    fn a_step_back_costs_less_than_two_intervals_and_half_a_prompt_is_kept() {
        for end in (300..20_000).step_by(129) {
            let places = lengths(&placed(&[end]));
            assert_eq!(places.len(), CHECKPOINTS);
            assert!(end - places[2] < INTERVAL as u32 && end - places[1] < 2 * INTERVAL as u32);
            assert!(
                places[0] * 3 >= end - 2 * INTERVAL as u32,
                "{end}: {places:?}"
            );
        }
    }

    #[test]
    fn the_end_of_a_prompt_stays_while_an_answer_grows() {
        let mut ends = vec![5000];
        ends.extend(5001..=6000);
        let places = placed(&ends);
        assert_eq!(lengths(&places), [4928, 5888, 5952]);
        assert!(places[0].turn);
        // The results of tools between the thoughts of one answer.
        for round in 1..10 {
            let at = 6000 + 300 * round;
            ends.push(at - 150);
            ends.extend(at - 149..=at);
            let kept = lengths(&placed(&ends));
            assert_eq!(kept[0], 4928, "{kept:?}");
        }
    }

    fn grow(states: &mut States<HostStates>, track: &mut Track, len: u32, end: u32) {
        states.grow(track, len, end).unwrap();
        let buffers = track.batch(len).unwrap();
        let content = |length: u32| vec![length as f32; 3];
        if let Some(before) = buffers.before {
            assert_eq!(states.pool.memory.states[before], content(len));
        }
        states.pool.memory.states[buffers.after] = content(end);
        for (length, buffer) in buffers.checkpoints {
            states.pool.memory.states[buffer] = content(length);
        }
    }

    fn newest(states: &States<HostStates>, track: &Track) -> Vec<f32> {
        track.newest.map_or(Vec::new(), |at| {
            states.pool.memory.states[at.buffer].clone()
        })
    }

    #[test]
    fn a_sequence_goes_back_to_the_last_state_that_it_has() {
        let (mut states, mut track) = (States::new(HostStates::new(3)), Track::default());
        grow(&mut states, &mut track, 0, 200);
        grow(&mut states, &mut track, 200, 201);
        assert_eq!(states.shrink(&mut track, 201), 201);
        // The state before the last batch.
        assert_eq!(states.shrink(&mut track, 200), 200);
        assert_eq!(newest(&states, &track), [200.0; 3]);
        let mut fork = states.fork(&track);
        assert_eq!(states.shrink(&mut track, 199), 192);
        assert_eq!(newest(&states, &track), [192.0; 3]);
        grow(&mut states, &mut track, 192, 193);
        assert_eq!(newest(&states, &fork), [200.0; 3]);
        assert_eq!(states.shrink(&mut fork, 130), 128);
        assert_eq!(states.shrink(&mut fork, 127), 64);
        assert_eq!(states.shrink(&mut fork, 63), 0);
        assert!(fork.newest.is_none());
        assert_eq!(states.shrink(&mut track, 190), 128);
        assert_eq!(newest(&states, &track), [128.0; 3]);
        states.close(&track);
        assert_eq!(states.pool.in_use(), 0);
        assert!(
            states
                .pool
                .memory
                .states
                .iter()
                .flatten()
                .all(|value| *value == 0.0)
        );
    }

    #[test]
    fn a_sequence_holds_no_more_states_than_it_counts_with() {
        let (mut states, mut track) = (States::new(HostStates::new(3)), Track::default());
        let mut len = 0;
        for rows in [1, 700, 1, 1, 63, 64, 65, 8, 9, 500, 1].repeat(20) {
            grow(&mut states, &mut track, len, len + rows);
            len += rows;
            if rows == 65 {
                len = states.shrink(&mut track, len - 30);
            }
            let held = states.pool.in_use();
            let most = bytes_per_sequence(3) / (4 * 3);
            assert!(held as u64 <= most, "{held} states");
        }
    }

    #[test]
    fn a_batch_that_fails_changes_nothing() {
        let (mut states, mut track) = (States::new(HostStates::new(3)), Track::default());
        grow(&mut states, &mut track, 0, 100);
        grow(&mut states, &mut track, 100, 101);
        grow(&mut states, &mut track, 101, 300);
        assert_eq!(states.shrink(&mut track, 101), 101);
        assert_eq!(newest(&states, &track), [101.0; 3]);
        // At the first batch.
        let mut other = Track::default();
        grow(&mut states, &mut other, 0, 5);
        assert_eq!(states.shrink(&mut other, 0), 0);
        assert!(other.buffers().next().is_none());
    }
}
